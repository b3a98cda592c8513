from jaxroll.train.evaluation import (
    NonFiniteError as NonFiniteError,
    episode_means as episode_means,
    evaluate as evaluate,
)
from jaxroll.train.history import History as History
from jaxroll.train.hooks import Event as Event
from jaxroll.train.logging import (
    CsvLogger as CsvLogger,
    JsonlLogger as JsonlLogger,
    Loggers as Loggers,
    TensorBoardLogger as TensorBoardLogger,
    make_loggers as make_loggers,
)
from jaxroll.train.loop import train as train
from jaxroll.train.options import Options as Options
from jaxroll.train.plot import plot_runs as plot_runs
from jaxroll.train.progress import Progress as Progress
from jaxroll.train.states import (
    best_checkpoint as best_checkpoint,
    describe as describe,
    load as load,
    save as save,
)

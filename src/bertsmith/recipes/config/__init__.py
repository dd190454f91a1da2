"""The whole configuration of each verb: what the command line and the YAML file can say.

Composed of the parts' own configs. Imports neither torch nor numpy.
"""

from bertsmith.recipes.config.data import DoctorConfig, PrepareConfig
from bertsmith.recipes.config.finetune import FinetuneConfig, SearchConfig
from bertsmith.recipes.config.masked_lm import FillConfig, ScoreConfig
from bertsmith.recipes.config.plan import PlanFinetuneConfig, PlanOptions, PlanPretrainConfig
from bertsmith.recipes.config.pretrain import CoverageConfig, PretrainConfig
from bertsmith.recipes.config.proof import DemoConfig, SelftestConfig
from bertsmith.recipes.config.training import TrainingConfig
from bertsmith.recipes.config.use import EvaluateConfig, MergeConfig, PredictConfig
from bertsmith.recipes.config.values import Device

__all__ = [
    "CoverageConfig",
    "DemoConfig",
    "Device",
    "DoctorConfig",
    "EvaluateConfig",
    "FillConfig",
    "FinetuneConfig",
    "MergeConfig",
    "PlanFinetuneConfig",
    "PlanOptions",
    "PlanPretrainConfig",
    "PredictConfig",
    "PrepareConfig",
    "PretrainConfig",
    "ScoreConfig",
    "SearchConfig",
    "SelftestConfig",
    "TrainingConfig",
]

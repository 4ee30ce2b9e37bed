__version__: str

from . import compute as compute
from . import config as config
from . import data as data
from . import engine as engine
from . import evaluation as evaluation
from . import interop as interop
from . import model as model
from . import routing as routing
from .api import create_model as create_model
from .api import load as load
from .config import ModelConfig as ModelConfig
from .config import Round as Round
from .config import make_rounds as make_rounds
from .config import plain_vit as plain_vit
from .config import preset as preset
from .engine import Embedding as Embedding
from .engine import EmbeddingEngine as EmbeddingEngine
from .engine import Engine as Engine
from .engine import Prediction as Prediction
from .engine import Segmentation as Segmentation
from .engine import SegmentationEngine as SegmentationEngine
from .model import ProgResViT as ProgResViT
from .model import RoundModel as RoundModel
from .model import RoundOutput as RoundOutput
from .model.saving import push_to_hub as push_to_hub
from .model.saving import save as save

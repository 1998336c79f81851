import os
import sys
from pathlib import Path

import torch

# importlib mode puts no folder on the path, and tests share modules of this one, also in the
# worker processes, which inherit the environment.
FOLDER = str(Path(__file__).parent)
sys.path.append(FOLDER)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), FOLDER)))
torch.set_num_threads(1)

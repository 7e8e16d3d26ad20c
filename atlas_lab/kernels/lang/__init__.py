from atlas_lab.kernels.lang.types import *
from atlas_lab.kernels.lang.kernel import *
from atlas_lab.kernels.lang.memory import *
from atlas_lab.kernels.lang.proxy import cuda

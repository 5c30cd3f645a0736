// gsync._C: what Python sees of the C++ side.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.doc() = "gsync's compiled part."; }

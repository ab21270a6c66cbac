// What Python sees.
#include <torch/csrc/utils/pybind.h>

#include "allocator.h"
#include "backend.h"

namespace chorale_torch {
namespace {

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               double timeout_seconds, std::vector<int> members) {
  const std::chrono::milliseconds timeout(static_cast<int64_t>(timeout_seconds * 1e3));
  return c10::make_intrusive<Backend>(store, rank, size, timeout, std::move(members));
}

}  // namespace
}  // namespace chorale_torch

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("make_backend", &chorale_torch::make_backend, pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("use_our_allocator", &chorale_torch::use_our_allocator);
}

#include "ddp_hook.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>
#include <vector>

#include "bindings.h"

// Two functions of libtorch_python, declared here because the header that declares them takes half a minute to compile.
namespace torch::jit {
TORCH_PYTHON_API c10::IValue toIValue(pybind11::handle object, const c10::TypePtr& type, std::optional<int32_t> length);
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue value);
}  // namespace torch::jit

namespace gsync {
namespace {

// The hook that is registered on DDP's reducer itself. It asks Python for the engine at its first bucket, and again only when
// that engine was closed; between the two it never takes Python's lock.
class NativeHook final : public c10d::CommHookInterface {
 public:
  explicit NativeHook(py::object provider) : provider_(std::move(provider)) {}

  ~NativeHook() override {
    const py::gil_scoped_acquire gil;
    provider_ = py::object();
  }
  NativeHook(const NativeHook&) = delete;
  NativeHook& operator=(const NativeHook&) = delete;

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    if (!engine_ || engine_->closed()) ask_provider();
    if (!engine_) return plain_mean(bucket);
    if (engine_->fp16_warning_due()) warn();
    return engine_->submit(bucket_of(bucket));
  }

  at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }

 private:
  void ask_provider() {
    const py::gil_scoped_acquire gil;
    try {
      const py::object answer = provider_();
      if (py::isinstance<Engine>(answer)) {
        engine_ = answer.cast<std::shared_ptr<Engine>>();
        group_.reset();
      } else {
        group_ = answer.cast<c10::intrusive_ptr<c10d::ProcessGroup>>();
        engine_.reset();
      }
    } catch (py::error_already_set& error) {
      // As torch's own error, it crosses the autograd engine with its type.
      error.restore();
      python_error torch_error;
      torch_error.persist();
      throw torch_error;
    }
  }

  void warn() {
    const py::gil_scoped_acquire gil;
    try {
      warn_if_fp16_vanishes(*engine_);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("gsync");  // this rank alone must not leave backward
    }
  }

  // What stock DDP does.
  c10::intrusive_ptr<c10::ivalue::Future> plain_mean(c10d::GradBucket& bucket) {
    const c10::AutoGradMode no_grad(false);
    std::vector<at::Tensor> tensors{bucket.getBufferRef().div_(group_->getSize())};
    auto work = group_->allreduce(tensors);
    return work->getFuture()->then(
        [buffer = tensors[0]](c10::ivalue::Future& future) -> c10::IValue {
          future.value();  // throws what went wrong
          return buffer;
        },
        c10::TensorType::get());
  }

  py::object provider_;
  std::shared_ptr<Engine> engine_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

// For a hook in Python: DDP expects its future to hold a Python object, which is made here, under the lock.
py::object submit_from_python(Engine& engine, c10d::GradBucket& bucket) {
  const py::object buffer = py::cast(bucket.getBuffer());
  c10::IValue result = torch::jit::toIValue(buffer, c10::PyObjectType::get(), std::nullopt);
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const py::gil_scoped_release no_gil;
    future = engine.submit(bucket_of(bucket), std::move(result));
  }
  return torch::jit::toPyObject(c10::IValue(std::move(future)));
}

}  // namespace

Bucket bucket_of(c10d::GradBucket& bucket) {
  return Bucket{static_cast<int64_t>(bucket.getIndex()), bucket.isLast(), bucket.getBuffer(), bucket.getParameters()};
}

void bind_ddp_hook(py::module_& module) {
  py::object engine = module.attr("Engine");
  engine.attr("submit") = py::cpp_function(&submit_from_python, py::name("submit"), py::is_method(engine), py::arg("bucket"),
                                           "Synchronises a dist.GradBucket; returns a torch.futures.Future of its buffer.");
  module.def(
      "register_ddp_hook",
      [](const std::shared_ptr<c10d::Reducer>& reducer, py::object provider) {
        reducer->register_comm_hook(std::make_unique<NativeHook>(std::move(provider)));
      },
      py::arg("reducer"), py::arg("provider"),
      "Registers a hook on a DDP reducer that needs no Python lock.\n\n"
      "provider() is called at the first bucket, and again at the first bucket after the engine was closed. It returns the Engine\n"
      "to use, or a ProcessGroup over which to take a plain mean; for the latter it is asked at every bucket. The reducer keeps\n"
      "provider alive: it should hold its state weakly.");
}

}  // namespace gsync

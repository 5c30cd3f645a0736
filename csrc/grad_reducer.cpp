#include "grad_reducer.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace gsync {
namespace {

using torch::autograd::variable_list;

// A gradient without entries, for a rank whose backward pass did not reach the parameter.
at::Tensor empty_sparse(const at::Tensor& parameter) {
  const auto options = at::TensorOptions().dtype(parameter.scalar_type()).device(parameter.device());
  std::vector<int64_t> rows{0};
  rows.insert(rows.end(), parameter.sizes().begin() + 1, parameter.sizes().end());
  return at::_sparse_coo_tensor_unsafe(at::empty({1, 0}, options.dtype(at::kLong)), at::empty(rows, options), parameter.sizes(),
                                       options.layout(at::kSparse), /*is_coalesced=*/true);
}

// Whether the tensor is a view, as the transposed product is that makes a weight's gradient, of one that nobody else refers to.
bool is_view_of_its_own(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
  return meta != nullptr && meta->has_bw_view() && meta->get_backward_view().base_.use_count() == 1;
}

at::Tensor& grad_of(const at::Tensor& parameter) { return parameter.mutable_grad(); }

}  // namespace

class GradReducer::Hook final : public torch::autograd::FunctionPostHook {
 public:
  Hook(std::weak_ptr<GradReducer> reducer, int64_t idx) : reducer_(std::move(reducer)), idx_(idx) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    if (const auto reducer = reducer_.lock()) reducer->ready(idx_, inputs.empty() ? at::Tensor() : inputs.front());
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    TORCH_CHECK(false,
                "gsync.GradReducer does not work under compiled autograd, which runs no hooks in C++; "
                "torch.compile of the model works without torch._dynamo.config.compiled_autograd");
  }

 private:
  std::weak_ptr<GradReducer> reducer_;
  int64_t idx_;
};

// ---- set-up ----

GradReducer::GradReducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, std::unique_ptr<ReducerOwner> owner)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      owner_(std::move(owner)),
      bucket_of_(parameters_.size(), -1),
      times_(parameters_.size(), 0) {}

GradReducer::~GradReducer() { close(); }

void GradReducer::install() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor parameter = parameters_[i];
    // A frozen parameter has no accumulator. The one made now is found again when it is unfrozen, as long as we keep it.
    const bool is_frozen = !parameter.requires_grad();
    if (is_frozen) parameter.set_requires_grad(true);
    auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
    if (is_frozen) parameter.set_requires_grad(false);
    const uintptr_t key = accumulator->add_post_hook(std::make_unique<Hook>(weak_from_this(), static_cast<int64_t>(i)));
    hooks_.emplace_back(std::move(accumulator), key);
  }
}

void GradReducer::set_engine(std::shared_ptr<Engine> engine) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  engine_ = std::move(engine);
  is_open_ = false;  // whatever a failed engine was doing
  in_flight_.clear();
}

void GradReducer::set_buckets(std::vector<ReducerBucket> buckets, bool learning) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  buckets_ = std::move(buckets);
  learning_ = learning;
  std::fill(bucket_of_.begin(), bucket_of_.end(), -1);
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (const int64_t idx : buckets_[b].parameters) bucket_of_[idx] = static_cast<int64_t>(b);
  }
}

void GradReducer::close() noexcept {
  if (closed_.exchange(true)) return;
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (auto& [accumulator, key] : hooks_) accumulator->del_post_hook(key);
  hooks_.clear();
  in_flight_.clear();
  engine_.reset();
}

// ---- one gradient ----

void GradReducer::ready(int64_t idx, const at::Tensor& incoming) {
  if (closed_.load(std::memory_order_relaxed)) return;
  if (!enabled()) {
    if (unsynchronised_.load(std::memory_order_relaxed) < 0) unsynchronised_.store(idx);
    return;
  }
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  note_task();
  if (!is_open_) begin();
  own_memory(idx, incoming);
  mark(idx);
}

void GradReducer::note_backward() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  note_task();
}

void GradReducer::note_task() {
  const int id = torch::autograd::get_current_graph_task_id();
  if (id == last_task_ && !tasks_.empty()) return;
  std::erase_if(tasks_, [](const std::weak_ptr<Task>& task) { return task.expired(); });
  raise_if_dead();
  last_task_ = id;
  for (const auto& weak : tasks_) {
    const auto task = weak.lock();
    if (task && task->id == id) return;
  }
  auto task = std::make_shared<Task>(Task{id});
  tasks_.push_back(task);
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this(), task = std::move(task)] { self->task_ended(task->id); });
}

void GradReducer::task_ended(int id) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::erase_if(tasks_, [id](const std::weak_ptr<Task>& weak) {
    const auto task = weak.lock();
    return !task || task->id == id;
  });
  if (last_task_ == id) last_task_ = -1;
  if (is_open_ && tasks_.empty() && !closed_.load()) finish();
}

void GradReducer::begin() {
  const auto has_no_place = [this](size_t i) { return bucket_of_[i] < 0 && parameters_[i].requires_grad(); };
  bool is_prepared = engine_ != nullptr;
  for (size_t i = 0; i < parameters_.size() && is_prepared; ++i) is_prepared = !has_no_place(i);
  try {
    if (engine_) engine_->raise_pending();
    if (!is_prepared) owner_->prepare();
    if (!engine_) throw_internal_error("a reducer was prepared and has no engine");
  } catch (...) {
    lose_from(0);
    throw;
  }

  pending_.assign(buckets_.size(), 0);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (bucket_of_[i] >= 0 && parameters_[i].requires_grad()) ++pending_[bucket_of_[i]];
  }
  std::fill(times_.begin(), times_.end(), 0);
  order_.clear();
  next_ = 0;
  is_open_ = true;
}

void GradReducer::own_memory(int64_t idx, const at::Tensor& incoming) {
  at::Tensor& gradient = grad_of(parameters_[idx]);
  if (!gradient.defined()) {
    if (!incoming.defined()) return;
    fail("the gradient of parameter '" + names_[idx] +
         "' was gone right after it came: a hook on the parameter has taken it away before it could be synchronised");
  }
  // Autograd may have given the parameter memory that other nodes of this backward pass are still to read, such as a view of a
  // larger gradient. It is shared when more than the incoming tensor, what that is a view of, and .grad refer to it.
  if (!incoming.defined() || !incoming.has_storage() || !gradient.has_storage()) return;
  if (incoming.storage().unsafeGetStorageImpl() != gradient.storage().unsafeGetStorageImpl()) return;
  if (gradient.storage().use_count() <= (is_view_of_its_own(incoming) ? 3 : 2)) return;
  const c10::AutoGradMode no_grad(false);
  at::Tensor own = empty_gradient(parameters_[idx]);
  own.copy_(gradient);
  gradient = own;
}

void GradReducer::mark(int64_t idx) {
  const int64_t bucket = bucket_of_[idx];
  if (bucket < 0) {
    fail("parameter '" + names_[idx] + "' was unfrozen while the backward pass was under way");
  }
  if (++times_[idx] > 1) {
    if (bucket >= next_) return;
    fail(
        "parameter '" + names_[idx] +
        "' got a second gradient in one backward pass, after the first had been sent; reentrant checkpointing of a module that is "
        "used twice does that: use_reentrant=False does not");
  }
  if (learning_) order_.push_back(idx);
  --pending_[bucket];
  if (learning_) return;
  while (next_ < static_cast<int64_t>(buckets_.size()) && pending_[next_] <= 0 && !buckets_[next_].is_late) hand_over(next_++);
}

// ---- one bucket ----

void GradReducer::check_gradient(int64_t idx, const at::Tensor& gradient) const {
  const at::Tensor& parameter = parameters_[idx];
  const bool fits = gradient.sizes() == parameter.sizes() && gradient.scalar_type() == parameter.scalar_type() &&
                    gradient.device() == parameter.device();
  TORCH_CHECK_VALUE(fits, "the gradient of parameter '", names_[idx], "' is ", gradient.scalar_type(), " ", gradient.sizes(),
                    " on ", gradient.device(), ", the parameter ", parameter.scalar_type(), " ", parameter.sizes(), " on ",
                    parameter.device());
  const bool is_sparse = gradient.layout() == at::kSparse;
  TORCH_CHECK_VALUE(gradient.layout() == at::kStrided || is_sparse, "the gradient of parameter '", names_[idx], "' has layout ",
                    gradient.layout(), "; expected a dense or sparse tensor");
  TORCH_CHECK_VALUE(is_sparse == buckets_[bucket_of_[idx]].is_sparse, "the gradient of parameter '", names_[idx], "' is ",
                    is_sparse ? "sparse" : "dense", ", and was expected to be ", is_sparse ? "dense" : "sparse",
                    ": sparse are those of nn.Embedding and nn.EmbeddingBag with sparse=True, used by nothing else");
}

Bucket GradReducer::make_bucket(int64_t number, InFlight& flight) {
  const ReducerBucket& members = buckets_[number];
  Bucket bucket;
  bucket.index = number;
  bucket.is_last = number + 1 == static_cast<int64_t>(buckets_.size());
  bucket.parameters.reserve(members.parameters.size());
  for (const int64_t idx : members.parameters) bucket.parameters.push_back(parameters_[idx]);
  if (members.is_sparse) {
    const at::Tensor& gradient = grad_of(bucket.parameters.front());
    if (gradient.defined()) check_gradient(members.parameters.front(), gradient);
    // A copy: the exchange works in place, and autograd's sparse gradients may share their values with others.
    flight.sparse = gradient.defined() ? gradient.clone() : empty_sparse(bucket.parameters.front());
    bucket.buffer = flight.sparse;
    return bucket;
  }

  auto list = std::make_shared<GradientList>();
  list->sources.reserve(members.parameters.size());
  for (const int64_t idx : members.parameters) {
    const at::Tensor& parameter = parameters_[idx];
    const at::Tensor& gradient = grad_of(parameter);
    at::Tensor& source = list->sources.emplace_back();
    // One that is frozen now keeps what it has; that nobody else trains it is seen by the flags.
    if (!gradient.defined() || !parameter.requires_grad()) {
      list->is_complete = false;
      continue;
    }
    check_gradient(idx, gradient);
    source = gradient;
    if (!lies_like(parameter, gradient)) {
      source = empty_gradient(parameter);
      source.copy_(gradient);
    }
  }
  list->targets = list->sources;
  if (!parameters_[members.parameters.front()].is_cpu()) {
    for (size_t i = 0; i < list->targets.size(); ++i) {
      if (!list->targets[i].defined()) list->targets[i] = empty_gradient(bucket.parameters[i]);
    }
  }
  flight.list = list;
  bucket.gradients = std::move(list);
  return bucket;
}

void GradReducer::hand_over(int64_t number) {
  const c10::AutoGradMode no_grad(false);
  InFlight& flight = in_flight_.emplace_back();
  flight.bucket = number;
  Bucket bucket;
  try {
    bucket = make_bucket(number, flight);
  } catch (const std::exception&) {
    in_flight_.pop_back();
    next_ = number;
    fail(cause_of(std::current_exception()));
  }
  owner_->sending(number);
  flight.future = engine_->submit(std::move(bucket));
}

// ---- the end of a step ----

void GradReducer::finish() {
  const c10::AutoGradMode no_grad(false);
  while (next_ < static_cast<int64_t>(buckets_.size())) hand_over(next_++);
  for (InFlight& flight : in_flight_) flight.future->wait();
  is_open_ = false;
  std::vector<InFlight> done = std::move(in_flight_);
  in_flight_.clear();
  engine_->raise_pending();
  for (InFlight& flight : done) write_back(flight);
  unsynchronised_.store(-1);
  waited_for_ = false;
  owner_->synchronised();
  if (!learning_) return;
  learning_ = false;
  std::vector<int64_t> repeated;
  for (size_t i = 0; i < times_.size(); ++i) {
    if (times_[i] > 1) repeated.push_back(static_cast<int64_t>(i));
  }
  owner_->learned(order_, repeated);
}

void GradReducer::write_back(InFlight& flight) {
  const std::vector<int64_t>& members = buckets_[flight.bucket].parameters;
  if (flight.sparse.defined()) {
    at::Tensor& gradient = grad_of(parameters_[members.front()]);
    if (gradient.defined()) {
      gradient.copy_(flight.sparse);
    } else if (flight.sparse._nnz() > 0) {
      gradient = flight.sparse;
    }
    return;
  }
  GradientList& list = *flight.list;
  if (!list.flags.empty()) {
    // The one wait for a device, and only on a rank whose backward pass did not reach every parameter.
    const c10::Device device = parameters_[members.front()].device();
    c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  }
  for (const GradientList::Flags& flags : list.flags) {
    const auto* bytes = static_cast<const uint8_t*>(flags.bytes.const_data_ptr());
    const int64_t flag_bytes = flags.bytes.numel() / static_cast<int64_t>(flags.parameter_idx.size());
    for (size_t i = 0; i < flags.parameter_idx.size(); ++i) {
      const uint8_t* flag = bytes + static_cast<int64_t>(i) * flag_bytes;
      const bool is_used = std::any_of(flag, flag + flag_bytes, [](uint8_t byte) { return byte != 0; });
      if (!is_used) list.targets[flags.parameter_idx[i]].reset();
    }
  }
  for (size_t i = 0; i < members.size(); ++i) {
    const at::Tensor& target = list.targets[i];
    if (!target.defined()) continue;
    const at::Tensor& parameter = parameters_[members[i]];
    at::Tensor& gradient = grad_of(parameter);
    if (!list.sources[i].defined()) {
      if (!parameter.requires_grad()) {
        fail("parameter '" + names_[members[i]] + "' is frozen on this rank and trained on another");
      }
      gradient = target;
    } else if (!gradient.is_same(target) && gradient.defined()) {
      gradient.copy_(target);
    } else {
      target.unsafeGetTensorImpl()->bump_version();  // autograd may have saved it (create_graph)
    }
  }
}

void GradReducer::wait() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  check();
  TORCH_CHECK(tasks_.empty(), "gsync: wait() was called inside of a backward pass, which ends by itself");
  if (enabled() && (waited_for_ || unsynchronised_.load() >= 0)) {
    begin();
    finish();
  }
  waited_for_ = true;
}

// ---- errors ----

void GradReducer::check() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::erase_if(tasks_, [](const std::weak_ptr<Task>& task) { return task.expired(); });
  raise_if_dead();
  if (engine_) engine_->raise_pending();
}

int64_t GradReducer::unhooked() const {
  for (size_t i = 0; i < parameters_.size() && i < hooks_.size(); ++i) {
    if (parameters_[i].requires_grad() && torch::autograd::impl::try_get_grad_accumulator(parameters_[i]) != hooks_[i].first)
      return static_cast<int64_t>(i);
  }
  return -1;
}

void GradReducer::raise_if_dead() {
  if (!is_open_ || !tasks_.empty()) return;
  fail("the backward pass before this one ended by an exception, after " + std::to_string(next_) + " of " +
       std::to_string(buckets_.size()) + " buckets");
}

void GradReducer::lose_from(int64_t first) noexcept {
  const c10::AutoGradMode no_grad(false);
  for (int64_t number = first; number < static_cast<int64_t>(buckets_.size()); ++number) {
    Bucket lost;
    for (const int64_t idx : buckets_[number].parameters) {
      if (parameters_[idx].requires_grad()) lost.parameters.push_back(parameters_[idx]);
    }
    try {
      poison(lost);
    } catch (...) {  // the device is lost, and its gradients with it
    }
  }
}

void GradReducer::fail(const std::string& cause) {
  is_open_ = false;
  engine_->abort(cause);
  lose_from(next_);
  for (InFlight& flight : in_flight_) {
    if (flight.future) flight.future->wait();
  }
  in_flight_.clear();
  engine_->raise_pending();
  throw_internal_error("an engine that was aborted has no error");
}

}  // namespace gsync

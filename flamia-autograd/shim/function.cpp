#include <torch/version.h>

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 11,
              "flamia-autograd wants torch 2.11 and found torch " TORCH_VERSION
              ": point LIBTORCH at a libtorch 2.11.0");

#include "error.h"
#include "function.h"

#include <caffe2/core/common.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

std::vector<const at::Tensor *> borrow(const variable_list &tensors) {
  std::vector<const at::Tensor *> pointers;
  pointers.reserve(tensors.size());
  for (const auto &tensor : tensors)
    pointers.push_back(tensor.defined() ? &tensor : nullptr);
  return pointers;
}

variable_list copy_handles(const at::Tensor *const *tensors, size_t len) {
  variable_list handles;
  handles.reserve(len);
  for (size_t i = 0; i < len; ++i)
    handles.push_back(tensors[i] ? *tensors[i] : at::Tensor());
  return handles;
}

// A node of its own instead of torch::autograd::Function: that one keeps its extra data until the
// graph dies, takes no undefined inputs, and reports every function under one name.
struct RustNode final : Node {
  RustNode(const FlamiaForward &forward, std::shared_ptr<void> state)
      : name_(forward.name), backward_(forward.backward),
        state_(std::move(state)) {}

  std::string name() const override { return name_; }

  // Outputs must be saved after they know this node as their grad_fn: only then does
  // SavedVariable leave the grad_fn out, which would otherwise own itself.
  void save(const at::Tensor *const *tensors, size_t len) {
    saved_.reserve(len);
    for (size_t i = 0; i < len; ++i) {
      const bool is_output =
          tensors[i]->defined() && tensors[i]->grad_fn().get() == this;
      saved_.emplace_back(*tensors[i], is_output);
    }
  }

  variable_list apply(variable_list &&grads) override {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    if (!state_)
      throw std::runtime_error(torch::autograd::ERR_BACKWARD_TWICE);
    // A backward that runs the engine itself may release this node under our feet.
    const std::shared_ptr<void> state = state_;

    variable_list saved;
    saved.reserve(saved_.size());
    for (const auto &variable : saved_)
      saved.push_back(variable.unpack(getptr()));

    const size_t inputs_len = num_outputs();
    variable_list input_grads(inputs_len);
    std::vector<at::Tensor *> slots(inputs_len);
    const auto needs_input_grad = std::make_unique<bool[]>(inputs_len);
    for (size_t i = 0; i < inputs_len; ++i) {
      slots[i] = &input_grads[i];
      needs_input_grad[i] = task_should_compute_output(i);
    }

    const auto saved_pointers = borrow(saved);
    const auto grad_pointers = borrow(grads);
    const FlamiaBackwardCall call{
        saved_pointers.data(),
        saved_pointers.size(),
        grad_pointers.data(),
        grad_pointers.size(),
        needs_input_grad.get(),
        slots.data(),
        inputs_len,
        c10::GradMode::is_enabled(),
    };
    const std::unique_ptr<char, decltype(&std::free)> error(
        backward_(state.get(), &call), &std::free);
    if (error)
      throw std::runtime_error(error.get());
    return input_grads;
  }

  // Called after a backward that does not keep the graph, and before the node dies.
  void release_variables() override {
    std::shared_ptr<void> state;
    std::vector<SavedVariable> saved;
    {
      std::lock_guard<std::recursive_mutex> guard(lock_);
      state.swap(state_);
      saved.swap(saved_);
    }
  }

private:
  const std::string name_;
  char *(*const backward_)(const void *, const FlamiaBackwardCall *);
  // Recursive, so that a backward may reach its own node again through a saved output.
  std::recursive_mutex lock_;
  std::shared_ptr<void> state_;
  std::vector<SavedVariable> saved_;
};

// The number of handles that this call itself has on a tensor.
size_t own_handles(const FlamiaForward &forward, const c10::TensorImpl *impl) {
  size_t handles = 0;
  for (size_t i = 0; i < forward.outputs_len; ++i)
    handles += forward.outputs[i]->unsafeGetTensorImpl() == impl;
  for (size_t i = 0; i < forward.saved_len; ++i)
    handles += forward.saved[i]->unsafeGetTensorImpl() == impl;
  return handles;
}

// An output kept in the Rust state, in a view that is saved, or anywhere else would own the node
// that owns it, and neither would ever be freed.
void check_outputs_are_free(const FlamiaForward &forward) {
  for (size_t i = 0; i < forward.outputs_len; ++i) {
    const at::Tensor &output = *forward.outputs[i];
    bool is_input = false;
    for (size_t j = 0; j < forward.inputs_len; ++j)
      is_input |= forward.inputs[j] && forward.inputs[j]->is_same(output);
    // These are not given a grad_fn: an input is returned as a view of itself.
    if (is_input || forward.non_differentiable[i] ||
        !torch::autograd::isDifferentiableType(output.scalar_type()))
      continue;
    const size_t elsewhere =
        output.use_count() -
        own_handles(forward, output.unsafeGetTensorImpl());
    TORCH_CHECK(
        elsewhere == 0, "output ", i, " is still held ", elsewhere,
        " time(s) after forward, by the function itself or by a view of the "
        "output: the graph would keep itself alive for ever. Keep the output "
        "itself with save_for_backward, or return a copy");
  }
}

void attach(const FlamiaForward &forward, std::shared_ptr<void> state) {
  const variable_list inputs =
      copy_handles(forward.inputs, forward.inputs_len);
  const bool builds_graph =
      c10::GradMode::is_enabled() &&
      torch::autograd::any_variable_requires_grad(inputs);

  std::shared_ptr<RustNode> node;
  if (builds_graph) {
    check_outputs_are_free(forward);
    // deleteNode frees a chain of nodes in a loop, where plain destructors would recurse.
    node = std::shared_ptr<RustNode>(new RustNode(forward, std::move(state)),
                                     torch::autograd::deleteNode);
    node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  }

  std::vector<std::optional<at::Tensor>> raw_outputs;
  std::unordered_set<at::TensorImpl *> non_differentiable;
  for (size_t i = 0; i < forward.outputs_len; ++i) {
    raw_outputs.emplace_back(*forward.outputs[i]);
    if (forward.non_differentiable[i])
      non_differentiable.insert(forward.outputs[i]->unsafeGetTensorImpl());
  }
  variable_list present;
  for (const auto &input : inputs)
    if (input.defined())
      present.push_back(input);

  const auto no_jvp = [](const variable_list &,
                         const variable_list &) -> variable_list {
    throw std::runtime_error("forward-mode differentiation is not supported");
  };
  const auto view_as_self = [](const at::Tensor &x) { return x.view_as(x); };
  const auto outputs = torch::autograd::_wrap_outputs(
      present, non_differentiable, /*dirty_inputs=*/{}, raw_outputs, node,
      no_jvp, /*to_save_if_setup_context=*/{}, view_as_self,
      /*pure_view=*/false);

  if (node)
    node->save(forward.saved, forward.saved_len);
  for (size_t i = 0; i < forward.outputs_len; ++i)
    *forward.outputs[i] = *outputs[i];
}

} // namespace

extern "C" {

char *flamia_attach(const FlamiaForward *forward) {
  return catching([&] {
    // If this allocation fails, shared_ptr still calls drop_state.
    std::shared_ptr<void> state(forward->state, forward->drop_state);
    attach(*forward, std::move(state));
  });
}

void flamia_assign(at::Tensor *slot, const at::Tensor *value) { *slot = *value; }

bool flamia_grad_enabled(void) { return c10::GradMode::is_enabled(); }

char *flamia_torch_version(void) {
  std::string version;
  std::free(catching([&] {
    const auto &options = caffe2::GetBuildOptions();
    const auto found = options.find("TORCH_VERSION");
    if (found != options.end())
      version = found->second;
  }));
  return strdup(version.c_str());
}
}

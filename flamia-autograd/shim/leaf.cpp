#include "leaf.h"
#include "error.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdlib>
#include <memory>
#include <string>

namespace {

class Hook final : public torch::autograd::PostAccumulateGradHook {
public:
  Hook(void *state, char *(*call)(const void *), void (*drop_state)(void *))
      : state(state), call(call), drop_state(drop_state) {}
  Hook(const Hook &) = delete;
  Hook &operator=(const Hook &) = delete;
  ~Hook() override { drop_state(state); }

  void operator()(const torch::autograd::Variable &) override {
    if (char *text = call(state)) {
      const std::string message(text);
      std::free(text);
      TORCH_CHECK(false, message);
    }
  }

private:
  void *const state;
  char *(*const call)(const void *);
  void (*const drop_state)(void *);
};

} // namespace

extern "C" {

char *flamia_leaf_place(FlamiaTensor *leaf, const FlamiaTensor *place,
                        const FlamiaTensor *grad) {
  return catching([&] {
    // Without what autograd knows of `place`: a view of its could be neither detached nor zeroed.
    leaf->set_data(place->variable_data());
    leaf->mutable_grad() = grad->variable_data();
  });
}

char *flamia_leaf_changed(const FlamiaTensor *leaf) {
  return catching([&] { leaf->unsafeGetTensorImpl()->bump_version(); });
}

char *flamia_leaf_hook(const FlamiaTensor *leaf, void *state,
                       char *(*call)(const void *),
                       void (*drop_state)(void *)) {
  auto hook = std::make_unique<Hook>(state, call, drop_state);
  return catching([&] {
    TORCH_CHECK(leaf->is_leaf() && leaf->requires_grad(),
                "only a leaf that requires a gradient accumulates one");
    torch::autograd::impl::set_post_acc_grad_hooks(*leaf, std::move(hook));
  });
}

char *flamia_leaf_unhook(const FlamiaTensor *leaf) {
  return catching(
      [&] { torch::autograd::impl::set_post_acc_grad_hooks(*leaf, nullptr); });
}
}

#include "optim.h"
#include "error.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>

#include <vector>

namespace {

constexpr bool WITHOUT_AMSGRAD = false;
constexpr bool MINIMISE = false;

std::vector<at::Tensor> handles(const FlamiaTensor *const *tensors, size_t len) {
  std::vector<at::Tensor> list;
  list.reserve(len);
  for (size_t i = 0; i < len; ++i)
    list.push_back(*tensors[i]);
  return list;
}

} // namespace

extern "C" {

char *flamia_fused_adamw(const FlamiaAdamW *call) {
  return catching([&] {
    const at::NoGradGuard no_grad;
    const std::vector<at::Tensor> no_maxima;
    // Only read: one count serves all parameters.
    const std::vector<at::Tensor> steps(call->len, *call->step);
    at::_fused_adamw_(handles(call->params, call->len),
                      handles(call->grads, call->len),
                      handles(call->exp_avgs, call->len),
                      handles(call->exp_avg_sqs, call->len), no_maxima, steps,
                      call->lr, call->beta1, call->beta2, call->weight_decay,
                      call->eps, WITHOUT_AMSGRAD, MINIMISE, *call->grad_scale,
                      *call->skip);
    // torch does not count this operation's changes, and copies of a parameter go by the count.
    for (size_t i = 0; i < call->len; ++i)
      call->params[i]->unsafeGetTensorImpl()->bump_version();
  });
}
}

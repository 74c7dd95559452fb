// The C ABI of torch's fused AdamW. Ownership and errors as in function.h.
#pragma once

#include "function.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  // `len` each, Float, in one order and on one device.
  FlamiaTensor *const *params;
  const FlamiaTensor *const *grads;
  FlamiaTensor *const *exp_avgs;
  FlamiaTensor *const *exp_avg_sqs;
  size_t len;
  double lr;
  double beta1;
  double beta2;
  double weight_decay;
  double eps;
  // Of one Float on that device each.
  const FlamiaTensor *step;       // updates, this one included
  const FlamiaTensor *grad_scale; // gradients are divided by it
  const FlamiaTensor *skip;       // 1: nothing changes
} FlamiaAdamW;

char *flamia_fused_adamw(const FlamiaAdamW *call);

#ifdef __cplusplus
}
#endif

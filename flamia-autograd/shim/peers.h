// The C ABI of the attention that torch itself has on GPUs. Ownership and errors as in function.h.
#pragma once

#include "function.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  FLAMIA_FLASH,        // packed [tokens, heads, head_dim]
  FLAMIA_CUDNN,        // [batch, heads, length, head_dim]
  FLAMIA_CUDNN_PACKED, // packed
} FlamiaPeer;

typedef struct {
  const FlamiaTensor *q;
  const FlamiaTensor *k;
  const FlamiaTensor *v;
  const FlamiaTensor *cu_seqlens; // int32 [documents + 1] on the GPU; not read by FLAMIA_CUDNN
  int64_t longest;
  bool is_causal;
  double scale;
} FlamiaPeerCall;

// What the backward takes of the forward: the output, its log-sum-exp, and the state of a dropout
// that there is none of.
enum { FLAMIA_PEER_RESULTS = 4 };

char *flamia_peer_forward(FlamiaPeer peer, const FlamiaPeerCall *call,
                          FlamiaTensor *const *results);

// Fills dQ, dK and dV.
char *flamia_peer_backward(FlamiaPeer peer, const FlamiaPeerCall *call,
                           const FlamiaTensor *const *results,
                           const FlamiaTensor *grad_output,
                           FlamiaTensor *const *grads);

#ifdef __cplusplus
}
#endif

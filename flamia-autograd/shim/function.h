// The C ABI between Rust and torch's autograd engine.
//
// Ownership: every tensor pointer is borrowed for the call that it is passed to; a null pointer
// stands for an absent (undefined) tensor. Only the Rust state changes hands, see flamia_attach.
// Errors: a returned `char *` is null on success, else a message from malloc that the receiver
// frees. No exception and no panic crosses in either direction.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
namespace at {
class Tensor;
}
using FlamiaTensor = at::Tensor;
extern "C" {
#else
typedef struct FlamiaTensor FlamiaTensor;
#endif

// One run of a backward, for the Rust callback.
typedef struct {
  const FlamiaTensor *const *saved;
  size_t saved_len;
  const FlamiaTensor *const *grads; // one per output
  size_t grads_len;
  const bool *needs_input_grad;
  FlamiaTensor *const *input_grads; // undefined tensors, to be filled by flamia_assign
  size_t inputs_len;
  bool grad_enabled; // the backward itself is differentiated (create_graph)
} FlamiaBackwardCall;

// A finished forward, to be entered in the graph.
typedef struct {
  const char *name;
  const FlamiaTensor *const *inputs;
  size_t inputs_len;
  FlamiaTensor *const *outputs; // each replaced by its differentiable self
  const bool *non_differentiable; // one per output
  size_t outputs_len;
  const FlamiaTensor *const *saved;
  size_t saved_len;
  void *state;
  char *(*backward)(const void *state, const FlamiaBackwardCall *call);
  void (*drop_state)(void *state);
} FlamiaForward;

// Gives the outputs a grad_fn that calls `backward`, when the grad mode is on and an input
// requires grad. Takes `state` over whatever the result is: drop_state is called once, on any
// thread, at once if no graph is built.
char *flamia_attach(const FlamiaForward *forward);

void flamia_assign(FlamiaTensor *slot, const FlamiaTensor *value);

bool flamia_grad_enabled(void);

// The version the loaded libtorch says it has ("2.11.0"), empty if it does not say.
char *flamia_torch_version(void);

#ifdef __cplusplus
}
#endif

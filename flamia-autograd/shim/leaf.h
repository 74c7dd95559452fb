// The C ABI of what torch lets one do with a parameter and its gradient that tch does not. Ownership and errors as
// in function.h.
#pragma once

#include "function.h"

#ifdef __cplusplus
extern "C" {
#endif

// From here on `leaf` is the memory of `place`, and its gradient that of `grad`, all of one shape.
// Backwards add to the gradient in place.
char *flamia_leaf_place(FlamiaTensor *leaf, const FlamiaTensor *place,
                        const FlamiaTensor *grad);

// Counts a change of the leaf that went through other tensors.
char *flamia_leaf_changed(const FlamiaTensor *leaf);

// Has `call` called, on any thread, whenever a backward has added to the leaf's gradient. Takes `state`
// over whatever the result is: drop_state is called once, when the leaf gets another hook or goes.
char *flamia_leaf_hook(const FlamiaTensor *leaf, void *state,
                       char *(*call)(const void *state),
                       void (*drop_state)(void *state));

char *flamia_leaf_unhook(const FlamiaTensor *leaf);

#ifdef __cplusplus
}
#endif

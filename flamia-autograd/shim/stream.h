// The C ABI of torch's CUDA streams and memory. Errors as in function.h.
//
// All of it goes through the interfaces that libtorch_cuda registers with the rest of torch when it
// is loaded, so that nothing here has to be linked with it. Without it, calls fail.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int64_t id; // torch's own number of it
  int32_t device;
  void *handle; // the cudaStream_t, null for the default stream
} FlamiaStream;

// One of torch's streams, which live as long as the process.
char *flamia_stream_new(int32_t device, FlamiaStream *stream);

// Makes the stream and its device this thread's current ones, and says which were.
char *flamia_stream_enter(const FlamiaStream *stream, FlamiaStream *previous, int32_t *previous_device);

// Undoes flamia_stream_enter.
char *flamia_stream_leave(const FlamiaStream *previous, int32_t previous_device);

// Makes the device this thread's current one.
char *flamia_device_use(int32_t device);

// Bytes that tensors occupy on a device, now and at most since the last reset of that.
char *flamia_memory(int32_t device, int64_t *now, int64_t *peak);

char *flamia_memory_reset_peak(int32_t device);

#ifdef __cplusplus
}
#endif

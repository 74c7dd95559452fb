// The C ABI of c10d: stores, process groups, collectives. Ownership of tensors and errors as in
// function.h; torch keeps the tensors of a collective until it is done.
//
// What is made here is freed by the function beside it. A work may be freed before it is done.
#pragma once

#include "function.h"

#include <stdint.h>

typedef struct FlamiaStore FlamiaStore;
typedef struct FlamiaGroup FlamiaGroup;
typedef struct FlamiaWork FlamiaWork;

#ifdef __cplusplus
extern "C" {
#endif

// A TCPStore's client, and its server with `is_server`.
char *flamia_store_new(const char *host, uint16_t port, bool is_server,
                       int64_t timeout_ms, FlamiaStore **store);
void flamia_store_free(FlamiaStore *store);

char *flamia_store_set(const FlamiaStore *store, const char *key,
                       const uint8_t *value, size_t len);

// Waits for the key. The value is malloc'ed, for the caller to free.
char *flamia_store_get(const FlamiaStore *store, const char *key,
                       int64_t timeout_ms, uint8_t **value, size_t *len);

char *flamia_store_has(const FlamiaStore *store, const char *key, bool *has);

typedef enum { FLAMIA_GLOO, FLAMIA_NCCL } FlamiaBackend;

typedef struct {
  FlamiaBackend backend;
  const FlamiaStore *store;
  const char *name; // groups of one store differ in it
  int rank;
  int size;
  int64_t timeout_ms;
  int device; // of NCCL
} FlamiaMembership;

// The symbol of a backend that this process has not loaded, null if it has all.
const char *flamia_backend_lacks(FlamiaBackend backend);

// With Gloo, waits until all others are there.
char *flamia_group_new(const FlamiaMembership *membership, FlamiaGroup **group);
// Waits for what is under way.
void flamia_group_free(FlamiaGroup *group);

// The sum over ranks.
char *flamia_all_reduce(const FlamiaGroup *group, FlamiaTensor *tensor,
                        FlamiaWork **work);

// `output` is this rank's part of the sum over ranks of `input`.
char *flamia_reduce_scatter(const FlamiaGroup *group, FlamiaTensor *output,
                            FlamiaTensor *input, FlamiaWork **work);

// `output` is the ranks' `input`s in order.
char *flamia_all_gather(const FlamiaGroup *group, FlamiaTensor *output,
                        FlamiaTensor *input, FlamiaWork **work);

char *flamia_broadcast(const FlamiaGroup *group, FlamiaTensor *tensor, int root,
                       FlamiaWork **work);

char *flamia_barrier(const FlamiaGroup *group, FlamiaWork **work);

// With NCCL the current stream waits, and the host does not.
char *flamia_work_wait(const FlamiaWork *work);
void flamia_work_free(FlamiaWork *work);

#ifdef __cplusplus
}
#endif

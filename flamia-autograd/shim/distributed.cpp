#include "distributed.h"
#include "error.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

// What Rust holds: one reference each.
struct FlamiaStore {
  c10::intrusive_ptr<c10d::Store> pointer;
};
struct FlamiaGroup {
  c10::intrusive_ptr<c10d::Backend> pointer;
};
struct FlamiaWork {
  c10::intrusive_ptr<c10d::Work> pointer;
};

namespace {

using c10d::Backend;
using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using OptionsPtr = c10::intrusive_ptr<Backend::Options>;

// The headers of torch's process groups need those of Gloo, CUDA and NCCL, of the very versions that
// torch was built with; its packages bring none of them. All that is needed of the
// classes are constructors, which are functions of the libraries, and their base, whose header is
// there. So constructors are looked up by name, which also tells what a torch lacks, and called as the
// C++ ABI of Linux calls them: on memory for the object, arguments with a destructor by address.
constexpr const char *GLOO_OPTIONS =
    "_ZN4c10d16ProcessGroupGloo7Options14create_"
    "defaultENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE";
constexpr const char *GLOO_GROUP =
    "_ZN4c10d16ProcessGroupGlooC1ERKN3c1013intrusive_ptrINS_5StoreENS1_"
    "6detail34intrusive_target_default_null_typeIS3_EEEEiiNS2_INS0_"
    "7OptionsENS5_ISA_EEEE";
constexpr const char *NCCL_OPTIONS = "_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb";
constexpr const char *NCCL_GROUP =
    "_ZN4c10d16ProcessGroupNCCLC1EN3c1013intrusive_ptrINS_5StoreENS1_"
    "6detail34intrusive_target_default_null_typeIS3_EEEEiiNS2_INS0_"
    "7OptionsENS5_IS8_EEEE";

// More than any of the objects takes, a few kilobytes at most: their size is in the headers alone.
constexpr size_t ROOM = 256 * 1024;

template <typename Function> Function *found(const char *symbol) {
  void *const address = dlsym(RTLD_DEFAULT, symbol);
  TORCH_CHECK(address, "this torch has no ", symbol);
  return reinterpret_cast<Function *>(address);
}

// A new T that `construct` makes of the memory.
template <typename T, typename Construct>
c10::intrusive_ptr<T> constructed(Construct construct) {
  void *const memory = ::operator new(ROOM);
  std::memset(memory, 0, ROOM);
  try {
    construct(memory);
  } catch (...) {
    ::operator delete(memory);
    throw;
  }
  // Base and object begin at one address, as all of them have single bases.
  return c10::intrusive_ptr<T>::unsafe_steal_from_new(static_cast<T *>(memory));
}

c10::intrusive_ptr<Backend> gloo(const FlamiaMembership &m,
                                 const StorePtr &store) {
  const auto options = found<OptionsPtr(milliseconds)>(GLOO_OPTIONS);
  const auto group =
      found<void(void *, const StorePtr &, int, int, OptionsPtr)>(GLOO_GROUP);
  return constructed<Backend>([&](void *memory) {
    group(memory, store, m.rank, m.size, options(milliseconds(m.timeout_ms)));
  });
}

c10::intrusive_ptr<Backend> nccl(const FlamiaMembership &m,
                                 const StorePtr &store) {
  const auto make_options = found<void(void *, bool)>(NCCL_OPTIONS);
  const auto group =
      found<void(void *, StorePtr, int, int, OptionsPtr)>(NCCL_GROUP);
  constexpr bool HIGH_PRIORITY = true;
  const auto options = constructed<Backend::Options>(
      [&](void *memory) { make_options(memory, HIGH_PRIORITY); });
  options->timeout = milliseconds(m.timeout_ms);
  options->group_name = m.name;
  auto made = constructed<Backend>(
      [&](void *memory) { group(memory, store, m.rank, m.size, options); });
  // It would guess the GPU from the rank.
  made->setBoundDeviceId(
      c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(m.device)));
  return made;
}

template <typename Start> char *started(FlamiaWork **work, Start start) {
  return catching([&] { *work = new FlamiaWork{start()}; });
}

} // namespace

extern "C" {

char *flamia_store_new(const char *host, uint16_t port, bool is_server,
                       int64_t timeout_ms, FlamiaStore **store) {
  return catching([&] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = is_server;
    options.waitWorkers = false;
    options.timeout = milliseconds(timeout_ms);
    *store =
        new FlamiaStore{c10::make_intrusive<c10d::TCPStore>(host, options)};
  });
}

void flamia_store_free(FlamiaStore *store) { delete store; }

char *flamia_store_set(const FlamiaStore *store, const char *key,
                       const uint8_t *value, size_t len) {
  return catching([&] {
    store->pointer->set(key, std::vector<uint8_t>(value, value + len));
  });
}

char *flamia_store_get(const FlamiaStore *store, const char *key,
                       int64_t timeout_ms, uint8_t **value, size_t *len) {
  return catching([&] {
    store->pointer->wait({key}, milliseconds(timeout_ms));
    const std::vector<uint8_t> found = store->pointer->get(key);
    auto *const copy = static_cast<uint8_t *>(std::malloc(found.size() + 1));
    TORCH_CHECK(copy, "out of memory");
    std::copy(found.begin(), found.end(), copy);
    *value = copy;
    *len = found.size();
  });
}

char *flamia_store_has(const FlamiaStore *store, const char *key, bool *has) {
  return catching([&] { *has = store->pointer->check({key}); });
}

const char *flamia_backend_lacks(FlamiaBackend backend) {
  const bool is_nccl = backend == FLAMIA_NCCL;
  for (const char *symbol : {is_nccl ? NCCL_OPTIONS : GLOO_OPTIONS,
                             is_nccl ? NCCL_GROUP : GLOO_GROUP})
    if (!dlsym(RTLD_DEFAULT, symbol))
      return symbol;
  return nullptr;
}

char *flamia_group_new(const FlamiaMembership *membership, FlamiaGroup **group) {
  return catching([&] {
    // Each group's keys lie apart.
    const StorePtr store = c10::make_intrusive<c10d::PrefixStore>(
        membership->name, membership->store->pointer);
    const auto make = membership->backend == FLAMIA_NCCL ? nccl : gloo;
    *group = new FlamiaGroup{make(*membership, store)};
  });
}

void flamia_group_free(FlamiaGroup *group) {
  // NCCL wants to be told before its process group goes. What fails then has been told by the work.
  std::free(catching([&] { group->pointer->shutdown(); }));
  delete group;
}

char *flamia_all_reduce(const FlamiaGroup *group, FlamiaTensor *tensor,
                        FlamiaWork **work) {
  return started(work, [&] {
    std::vector<at::Tensor> tensors{*tensor};
    return group->pointer->allreduce(tensors);
  });
}

char *flamia_reduce_scatter(const FlamiaGroup *group, FlamiaTensor *output,
                            FlamiaTensor *input, FlamiaWork **work) {
  return started(work, [&] {
    return group->pointer->_reduce_scatter_base(*output, *input);
  });
}

char *flamia_all_gather(const FlamiaGroup *group, FlamiaTensor *output,
                        FlamiaTensor *input, FlamiaWork **work) {
  return started(
      work, [&] { return group->pointer->_allgather_base(*output, *input); });
}

char *flamia_broadcast(const FlamiaGroup *group, FlamiaTensor *tensor, int root,
                       FlamiaWork **work) {
  return started(work, [&] {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    std::vector<at::Tensor> tensors{*tensor};
    return group->pointer->broadcast(tensors, options);
  });
}

char *flamia_barrier(const FlamiaGroup *group, FlamiaWork **work) {
  return started(work, [&] { return group->pointer->barrier(); });
}

char *flamia_work_wait(const FlamiaWork *work) {
  return catching([&] { work->pointer->wait(); });
}

void flamia_work_free(FlamiaWork *work) { delete work; }
}

#include "stream.h"
#include "error.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace {

using c10::impl::VirtualGuardImpl;

constexpr auto CUDA = c10::DeviceType::CUDA;

c10::Device device_at(int32_t device) {
  TORCH_CHECK(device >= 0 && device < VirtualGuardImpl(CUDA).deviceCount(),
              "there is no CUDA device ", device);
  return c10::Device(CUDA, static_cast<c10::DeviceIndex>(device));
}

FlamiaStream described(c10::Stream stream) {
  return {stream.id(), stream.device_index(), stream.native_handle()};
}

c10::Stream stream_of(const FlamiaStream &stream) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(stream.device), stream.id);
}

// The statistics exist once something was allocated.
c10::DeviceAllocator &allocator() {
  const VirtualGuardImpl cuda_is_loaded(CUDA);
  return *c10::getDeviceAllocator(CUDA);
}

} // namespace

extern "C" {

char *flamia_stream_new(int32_t device, FlamiaStream *stream) {
  return catching([&] {
    const VirtualGuardImpl cuda(CUDA);
    *stream = described(cuda.getStreamFromGlobalPool(device_at(device)));
  });
}

char *flamia_stream_enter(const FlamiaStream *stream, FlamiaStream *previous,
                          int32_t *previous_device) {
  return catching([&] {
    const VirtualGuardImpl cuda(CUDA);
    const auto entered = stream_of(*stream);
    *previous_device = cuda.exchangeDevice(entered.device()).index();
    *previous = described(cuda.exchangeStream(entered));
  });
}

char *flamia_stream_leave(const FlamiaStream *previous,
                          int32_t previous_device) {
  return catching([&] {
    const VirtualGuardImpl cuda(CUDA);
    cuda.exchangeStream(stream_of(*previous));
    cuda.setDevice(device_at(previous_device));
  });
}

char *flamia_device_use(int32_t device) {
  return catching(
      [&] { VirtualGuardImpl(CUDA).setDevice(device_at(device)); });
}

char *flamia_memory(int32_t device, int64_t *now, int64_t *peak) {
  return catching([&] {
    const auto all =
        static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto bytes =
        allocator().getDeviceStats(device_at(device).index()).allocated_bytes;
    *now = bytes[all].current;
    *peak = bytes[all].peak;
  });
}

char *flamia_memory_reset_peak(int32_t device) {
  return catching(
      [&] { allocator().resetPeakStats(device_at(device).index()); });
}
}

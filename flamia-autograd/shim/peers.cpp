#include "peers.h"
#include "error.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_cudnn_attention_backward.h>
#include <ATen/ops/_cudnn_attention_forward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>

#include <tuple>

namespace {

constexpr double NO_DROPOUT = 0.0;
constexpr bool WITH_LSE = true;
constexpr bool WITHOUT_DEBUG_MASK = false;

template <typename Results>
void give(const Results &from, FlamiaTensor *const *to) {
  std::apply(
      [&](const auto &...tensors) {
        size_t i = 0;
        ((*to[i++] = tensors), ...);
      },
      from);
}

// Output, log-sum-exp, seed and offset of the nine results of cuDNN's forwards.
template <typename Results> auto chosen(const Results &all) {
  return std::tie(std::get<0>(all), std::get<1>(all), std::get<6>(all),
                  std::get<7>(all));
}

void forward(FlamiaPeer peer, const FlamiaPeerCall &call,
             FlamiaTensor *const *results) {
  const auto &[q, k, v] = std::tie(*call.q, *call.k, *call.v);
  switch (peer) {
  case FLAMIA_FLASH: {
    const auto all = at::_flash_attention_forward(
        q, k, v, *call.cu_seqlens, *call.cu_seqlens, call.longest, call.longest,
        NO_DROPOUT, call.is_causal, WITHOUT_DEBUG_MASK, call.scale);
    return give(std::tie(std::get<0>(all), std::get<1>(all), std::get<2>(all),
                         std::get<3>(all)),
                results);
  }
  case FLAMIA_CUDNN:
    return give(chosen(at::_scaled_dot_product_cudnn_attention(
                    q, k, v, std::nullopt, WITH_LSE, NO_DROPOUT, call.is_causal,
                    WITHOUT_DEBUG_MASK, call.scale)),
                results);
  case FLAMIA_CUDNN_PACKED:
    return give(chosen(at::_cudnn_attention_forward(
                    q, k, v, std::nullopt, *call.cu_seqlens, *call.cu_seqlens,
                    call.longest, call.longest, WITH_LSE, NO_DROPOUT,
                    call.is_causal, WITHOUT_DEBUG_MASK, call.scale)),
                results);
  }
  TORCH_CHECK(false, "there is no peer ", static_cast<int>(peer));
}

void backward(FlamiaPeer peer, const FlamiaPeerCall &call,
              const FlamiaTensor *const *results, const at::Tensor &grad_output,
              FlamiaTensor *const *grads) {
  const auto &[q, k, v] = std::tie(*call.q, *call.k, *call.v);
  const auto &[out, lse, seed, offset] =
      std::tie(*results[0], *results[1], *results[2], *results[3]);
  const at::Tensor none;
  switch (peer) {
  case FLAMIA_FLASH:
    return give(at::_flash_attention_backward(
                    grad_output, q, k, v, out, lse, *call.cu_seqlens,
                    *call.cu_seqlens, call.longest, call.longest, NO_DROPOUT,
                    call.is_causal, seed, offset, call.scale),
                grads);
  case FLAMIA_CUDNN:
    return give(at::_scaled_dot_product_cudnn_attention_backward(
                    grad_output, q, k, v, out, lse, seed, offset, none, none,
                    none, call.longest, call.longest, NO_DROPOUT,
                    call.is_causal, call.scale),
                grads);
  case FLAMIA_CUDNN_PACKED:
    return give(at::_cudnn_attention_backward(
                    grad_output, q, k, v, out, lse, seed, offset, none,
                    *call.cu_seqlens, *call.cu_seqlens, call.longest,
                    call.longest, NO_DROPOUT, call.is_causal, call.scale),
                grads);
  }
  TORCH_CHECK(false, "there is no peer ", static_cast<int>(peer));
}

} // namespace

extern "C" {

char *flamia_peer_forward(FlamiaPeer peer, const FlamiaPeerCall *call,
                          FlamiaTensor *const *results) {
  return catching([&] { forward(peer, *call, results); });
}

char *flamia_peer_backward(FlamiaPeer peer, const FlamiaPeerCall *call,
                           const FlamiaTensor *const *results,
                           const FlamiaTensor *grad_output,
                           FlamiaTensor *const *grads) {
  return catching([&] { backward(peer, *call, results, *grad_output, grads); });
}
}

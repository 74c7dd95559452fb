//! Which device trains: the one asked for, or an error. Never a silent fall back to the CPU.

use flamia_autograd::{CudaLoadError, StreamError, load_cuda, use_gpu};
use flamia_cuda::Gpu;
use tch::{Cuda, Device, TchError, Tensor};

use crate::machine::cpu_name;
use crate::settings;

/// Why the device asked for cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// There is a GPU that torch cannot use.
    #[error(
        "device {asked} was asked for, but CUDA cannot be used; --device cpu trains on the CPU"
    )]
    NoCuda {
        /// What was asked for.
        asked: settings::Device,
        /// Why.
        source: CudaLoadError,
    },
    /// The machine has none, or hides it.
    #[error(
        "device {asked} was asked for, but there is no GPU: is the driver installed and \
         CUDA_VISIBLE_DEVICES right? --device cpu trains on the CPU"
    )]
    NoGpu {
        /// What was asked for.
        asked: settings::Device,
    },
    /// One GPU for several ranks.
    #[error(
        "device {asked} was asked for by each of several ranks: --device auto gives every rank of a \
         machine a GPU of its own, of those that CUDA_VISIBLE_DEVICES names"
    )]
    OneForAll {
        /// What was asked for.
        asked: settings::Device,
    },
    /// More ranks than GPUs.
    #[error(
        "rank {local_rank} of this machine, counted from 0, has no GPU of its own: torch sees {count}. Start \
         as many ranks as there are GPUs, or give --device cpu"
    )]
    NoGpuForRank {
        /// The rank.
        local_rank: usize,
        /// GPUs seen.
        count: i64,
    },
    /// torch cannot turn to it.
    #[error(transparent)]
    Current(#[from] StreamError),
    /// Fewer GPUs than that.
    #[error("device {asked} was asked for, but torch sees {count} GPU(s), counted from cuda:0")]
    NoSuchGpu {
        /// What was asked for.
        asked: settings::Device,
        /// GPUs seen.
        count: i64,
    },
}

/// Finds the device that `asked` names and says in words which one that is, and why.
///
/// # Errors
/// [`DeviceError`] when a GPU was asked for by name and cannot be had.
pub fn choose(asked: settings::Device) -> Result<(Device, String), DeviceError> {
    match asked {
        settings::Device::Cpu => Ok((Device::Cpu, "cpu".into())),
        settings::Device::Auto => Ok(match load_cuda() {
            Ok(true) => (
                Device::Cuda(0),
                "cuda:0, the first GPU that torch sees".into(),
            ),
            Ok(false) => (Device::Cpu, "cpu, as there is no GPU".into()),
            Err(error) => (Device::Cpu, format!("cpu, although {error}")),
        }),
        settings::Device::Cuda(index) => {
            if !load_cuda().map_err(|source| DeviceError::NoCuda { asked, source })? {
                return Err(DeviceError::NoGpu { asked });
            }
            let count = Cuda::device_count();
            match i64::try_from(index) {
                Ok(wanted) if wanted < count => Ok((Device::Cuda(index), asked.to_string())),
                _ => Err(DeviceError::NoSuchGpu { asked, count }),
            }
        }
    }
}

/// Finds the device of the rank `local_rank` of this machine's: with auto the GPU of that number, or the only one
/// that it sees where its launcher hides the others. That is torch's current GPU then.
///
/// # Errors
/// [`DeviceError`] when there is no GPU for this rank, or all were to take one.
pub fn choose_of_rank(
    asked: settings::Device,
    local_rank: usize,
) -> Result<(Device, String), DeviceError> {
    if matches!(asked, settings::Device::Cuda(_)) {
        return Err(DeviceError::OneForAll { asked });
    }
    let (device, words) = choose(asked)?;
    if device == Device::Cpu {
        return Ok((device, words));
    }
    let count = Cuda::device_count();
    let gpu = if count == 1 { 0 } else { local_rank };
    if gpu as i64 >= count {
        return Err(DeviceError::NoGpuForRank { local_rank, count });
    }
    use_gpu(gpu)?;
    Ok((
        Device::Cuda(gpu),
        format!("cuda:{gpu}, and each rank of this machine its own"),
    ))
}

/// The name of the CPU or GPU that `device` is.
pub fn name(device: Device) -> String {
    match device {
        Device::Cuda(ordinal) => Gpu::new(ordinal)
            .map(|gpu| gpu.name().to_string())
            .unwrap_or_else(|_| format!("cuda:{ordinal}")),
        _ => cpu_name(),
    }
}

/// Copies `host` to `device`, beside what a GPU is doing: from pinned memory, which torch keeps until
/// the stream has passed it.
///
/// # Errors
/// When torch cannot allocate or copy.
pub fn send(host: &Tensor, device: Device) -> Result<Tensor, TchError> {
    if !device.is_cuda() {
        return host.f_to_device(device);
    }
    let (kind, non_blocking, copy) = (host.kind(), true, false);
    host.f_pin_memory(device)?
        .f_to_device_(device, kind, non_blocking, copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_is_the_cpu() {
        assert_eq!(choose(settings::Device::Cpu).unwrap().0, Device::Cpu);
    }

    #[test]
    fn ranks_do_not_share_a_gpu() {
        assert_eq!(
            choose_of_rank(settings::Device::Cpu, 3).unwrap().0,
            Device::Cpu
        );
        let error = choose_of_rank(settings::Device::Cuda(0), 0).unwrap_err();
        assert!(matches!(error, DeviceError::OneForAll { .. }), "{error}");
    }

    #[test]
    fn a_gpu_asked_for_by_name_is_had_or_is_an_error() {
        match choose(settings::Device::Cuda(0)) {
            Ok((device, _)) => assert_eq!(device, Device::Cuda(0)),
            Err(error) => {
                assert!(
                    error.to_string().contains("device cuda:0 was asked for"),
                    "{error}"
                );
            }
        }
        let absent = choose(settings::Device::Cuda(1000));
        assert!(absent.unwrap_err().to_string().contains("cuda:1000"));
    }
}

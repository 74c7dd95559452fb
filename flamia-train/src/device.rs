//! Which device trains: the one asked for, or an error. Never a silent fall back to the CPU.

use flamia_autograd::{CudaLoadError, load_cuda};
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

//! NCCL, as far as one GPU goes: NCCL refuses two ranks of one GPU.
//! `cargo test -p flamia-autograd --test nccl -- --ignored` on a machine with an NVIDIA GPU.

use std::net::TcpListener;
use std::time::Duration;

use flamia_autograd::distributed::{Backend, Group, Member, Store, StoreAddress};
use flamia_autograd::load_cuda;
use tch::{Device, Kind, Tensor};

#[test]
#[ignore = "needs a GPU"]
fn a_group_of_one_gpu_reduces_scatters_gathers_and_broadcasts() {
    assert_eq!(load_cuda(), Ok(true));
    let patience = Duration::from_secs(60);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let address = StoreAddress {
        host: "127.0.0.1".into(),
        port,
    };
    let store = Store::open(address, 0, true, patience).unwrap();
    let member = Member { rank: 0, world: 1 };
    let group = Group::join(&store, "test", member, Backend::Nccl, 0, patience).unwrap();
    let values = || Tensor::arange(1000, (Kind::Float, Device::Cuda(0)));
    let tensor = values();
    group.all_reduce(&tensor).unwrap().wait().unwrap();
    group.broadcast(&tensor, 0).unwrap().wait().unwrap();
    group
        .reduce_scatter(&tensor, &tensor)
        .unwrap()
        .wait()
        .unwrap();
    group.all_gather(&tensor, &tensor).unwrap().wait().unwrap();
    let apart = tensor.zeros_like();
    group
        .reduce_scatter(&apart, &tensor)
        .unwrap()
        .wait()
        .unwrap();
    group.barrier().unwrap();
    assert_eq!(tensor, values());
    assert_eq!(apart, values());
    assert!(group.all_reduce(&Tensor::from_slice(&[1f32])).is_err());
}

//! First contact with a real NCCL on a real GPU: one rank, and two ranks on one card. It has
//! never run on one.
//!
//! `cargo test -p moesaic-collectives --test nccl_card -- --ignored --nocapture`, with a card,
//! its driver, and NCCL in the loader's search path or in `MOESAIC_NCCL`.

mod support;

use moesaic_collectives::nccl::{self, Kernels, Meeting, Nccl, NcclOptions};
use moesaic_collectives::{Collectives, CommElement, Reduction, World};
use moesaic_cuda::CudaDevice;
use moesaic_target::{CompileOptions, Compiler, Device};
use moesaic_toolchain::testing;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use support::{call, every_operation, read, slice};

fn card() -> Arc<dyn Device> {
    Arc::new(CudaDevice::open(0).expect("a card and its driver"))
}

/// Sums on the device, by our kernels.
fn options(device: &Arc<dyn Device>) -> NcclOptions {
    let source = Kernels::source(device.info().target).unwrap();
    let artifact = testing::nvrtc().compile(&source, &CompileOptions::default());
    let kernels = Kernels::load(device, &artifact.unwrap()).unwrap();
    NcclOptions {
        fold: Some(Arc::new(kernels)),
        deadline: Some(Duration::from_secs(60)),
        ..NcclOptions::default()
    }
}

fn use_it(mut world: Nccl, device: &Arc<dyn Device>) {
    println!(
        "rank {} of {} by {}",
        world.rank(),
        world.size(),
        world.transport()
    );
    every_operation(&mut world, device);
    in_a_graph(&mut world, device);
    world.finish(&call("finish")).unwrap();
}

fn in_a_graph(world: &mut Nccl, device: &Arc<dyn Device>) {
    let gpu = device.streams().unwrap();
    let number = |n: f32| n.to_ne_bytes().to_vec();
    let data = slice(device, CommElement::F32, &number(1.0));
    let warm = world.all_reduce(&data, &data, Reduction::Sum, &call("warm"));
    warm.unwrap().wait().unwrap();
    device.upload(&number(1.0), data.buffer(), 0).unwrap();
    gpu.begin_capture("sum").unwrap();
    let sum = world.all_reduce(&data, &data, Reduction::Sum, &call("sum"));
    sum.unwrap().wait().unwrap();
    let graph = gpu.end_capture().unwrap();
    for _ in 0..2 {
        // SAFETY: the buffer lives until the graph has run, below.
        unsafe { graph.launch() }.unwrap();
    }
    world.watch(&call("replay")).unwrap().wait().unwrap();
    let ranks = world.size() as f32;
    assert_eq!(read(device, &data), number(ranks * ranks));
}

#[test]
#[ignore = "needs a card and NCCL"]
fn one_rank_does_every_operation() {
    let device = card();
    let options = NcclOptions {
        world: Some(World::new(0, 1).unwrap()),
        meeting: Some(Meeting::Alone),
        ..options(&device)
    };
    use_it(nccl::start(Arc::clone(&device), &options).unwrap(), &device);
}

/// Runs two ranks on one card as two processes: this program again, as [`a_rank`].
fn two_ranks(variables: impl Fn(usize) -> Vec<(&'static str, String)>) {
    let folder = tempfile::tempdir().unwrap();
    let start = |rank: usize| -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "a_rank", "--nocapture"])
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", "2")
            .env("MOESAIC_RENDEZVOUS", folder.path())
            .env("MOESAIC_CARD_RANK", "1")
            .envs(variables(rank))
            .stdin(Stdio::null())
            .spawn()
            .unwrap()
    };
    let ranks = [start(0), start(1)];
    for mut rank in ranks {
        let status = rank.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

#[test]
#[ignore = "started by the others, twice"]
fn a_rank() {
    if std::env::var_os("MOESAIC_CARD_RANK").is_none() {
        return;
    }
    let device = card();
    let options = NcclOptions {
        share_device: true,
        ..options(&device)
    };
    use_it(nccl::start(Arc::clone(&device), &options).unwrap(), &device);
}

/// NCCL documents the permission since 2.30, for a few ranks.
#[test]
#[ignore = "needs a card and NCCL 2.30 or later"]
fn two_ranks_of_one_card_by_permission() {
    two_ranks(|_| {
        vec![
            ("NCCL_MULTI_RANK_GPU_ENABLE", "1".to_string()),
            ("NCCL_MAX_CTAS", "8".to_string()),
        ]
    });
}

/// The ranks take each other for different machines and communicate through sockets.
#[test]
#[ignore = "needs a card and NCCL"]
fn two_ranks_of_one_card_as_two_hosts() {
    two_ranks(|rank| {
        vec![
            ("NCCL_HOSTID", format!("moesaic-{rank}")),
            ("NCCL_SOCKET_IFNAME", "lo".to_string()),
        ]
    });
}

//! The placement of a buffer's pages: on the NUMA node whose lane wrote them
//! first.
//!
//! On a machine of one node there is one lane, and all pages are on that node.
//! `benches/nodes/run.sh tests` runs these tests on several.

#![cfg(target_os = "linux")]

mod common;

use common::{compile, entry};
use moesaic_cpu::{CpuDevice, host_nodes};
use moesaic_kernel::{DType, Param};
use moesaic_target::{Arg, Device, LaunchDims};
use std::io;

/// Block b writes its own part of `to` once all blocks have begun, so that no
/// thread has two of them.
const FILL: &str = "
typedef __INT64_TYPE__ i64;
void fill(void *const *args, i64 first, i64 last, i64 grid_x) {
  char *to = *(char **)args[0];
  i64 *begun = *(i64 **)args[1];
  i64 bytes = *(i64 *)args[2];
  __atomic_add_fetch(begun, last - first, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(begun, __ATOMIC_SEQ_CST) < grid_x) {}
  for (i64 i = first * bytes; i < last * bytes; ++i) to[i] = 1;
}
";

/// Bytes of a block: whole huge pages.
const BYTES: usize = 4 << 20;

/// Returns the node of each page of some memory that starts with a page.
fn nodes(start: u64, bytes: usize) -> Vec<i32> {
    let pages: Vec<u64> = (start..start + bytes as u64).step_by(4096).collect();
    let mut nodes = vec![-1; pages.len()];
    let (own, stay) = (0, std::ptr::null::<i32>());
    let (list, found) = (pages.as_ptr(), nodes.as_mut_ptr());
    // SAFETY: both lists are as long as is said; without nodes to go to the call
    // only says where pages lie.
    let asked =
        unsafe { libc::syscall(libc::SYS_move_pages, own, pages.len(), list, stay, found, 0) };
    assert_eq!(asked, 0, "{}", io::Error::last_os_error());
    nodes
}

/// Keeps this thread on the first processor that it may use, as the callers of
/// pinned devices should.
fn stay() {
    // SAFETY: a set of processors is plain bits, which are asked for, thinned out
    // and set for this thread.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let bytes = size_of_val(&set);
        assert_eq!(libc::sched_getaffinity(0, bytes, &raw mut set), 0);
        let numbers = 0..libc::CPU_SETSIZE as usize;
        let first = numbers.clone().find(|&cpu| libc::CPU_ISSET(cpu, &set));
        for cpu in numbers.filter(|&cpu| Some(cpu) != first) {
            libc::CPU_CLR(cpu, &mut set);
        }
        assert_eq!(libc::sched_setaffinity(0, bytes, &raw const set), 0);
    }
}

/// Returns the node of the pages that each block of a launch wrote.
fn filled(device: &CpuDevice, blocks: usize) -> Vec<i32> {
    let params = vec![
        Param::write("to", DType::I32, "[blocks]"),
        Param::write("begun", DType::I64, "[1]"),
        Param::i64("bytes"),
    ];
    let entry = entry("fill", params);
    let artifact = compile(FILL, vec![entry.clone()]).unwrap();
    let module = device.load(&artifact, &[entry]).unwrap();
    let to = device.alloc(blocks * BYTES).unwrap();
    let begun = device.alloc(8).unwrap();
    device.upload(&[0; 8], &begun, 0).unwrap();
    let args = [
        Arg::Ptr(to.ptr()),
        Arg::Ptr(begun.ptr()),
        Arg::I64(BYTES as i64),
    ];
    let dims = LaunchDims {
        grid: [blocks as u64, 1],
        threads: 1,
        shared_bytes: 0,
        cluster: 1,
    };
    // SAFETY: the arguments are those of `fill`, the buffers fit the grid.
    unsafe { module.launch("fill", dims, &args).unwrap() };
    let nodes = nodes(to.ptr().0, blocks * BYTES);
    let blocks = nodes.chunks_exact(BYTES / 4096);
    let one = |pages: &[i32]| {
        assert!(pages.iter().all(|&node| node == pages[0]), "{pages:?}");
        pages[0]
    };
    blocks.map(one).collect()
}

/// Checks, with a thread per node, that the n-th block's pages are on the n-th
/// node.
fn check(before: impl Fn()) {
    let count = host_nodes().count();
    if count > 16 {
        return; // nodes share lanes, and blocks of a lane have no order
    }
    let device = CpuDevice::with_threads(count).unwrap().pinned().unwrap();
    stay();
    before();
    let found = filled(&device, count);
    assert!(found.iter().all(|&node| node >= 0), "{found:?}");
    assert!(found.is_sorted_by(|a, b| a < b), "{found:?}");
    println!("blocks are on nodes {found:?}");
}

#[test]
fn pages_lie_on_the_node_whose_lane_writes_them_first() {
    check(|| {});
}

/// Memory that the allocator returns again has pages, on the node of its last
/// owner.
#[test]
fn memory_that_was_freed_has_no_node_any_more() {
    check(|| {
        // The first free teaches glibc to keep other memory of its size.
        for megabytes in [30, 28, 28] {
            std::hint::black_box(vec![1_u8; megabytes << 20]);
        }
    });
}

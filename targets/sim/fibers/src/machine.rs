//! The functions that kernel text calls: the table `Machine` of
//! `prelude/sim/machine.hpp`.
//!
//! Every function runs on the stack of the calling fiber, and holds no
//! reference to the worker while another fiber may run.

use crate::block::{Collective, State};
use crate::fault::{Access, AccessKind, Fault, Problem};
use crate::product::{Operands, Shape};
use crate::worker::{current, fail, park};
use std::ffi::c_void;

/// The table, in the order of the text.
#[repr(C)]
pub(crate) struct MachineTable {
    thread_index: extern "C" fn() -> i32,
    block_x: extern "C" fn() -> i64,
    block_y: extern "C" fn() -> i64,
    block_sync: extern "C" fn(i32),
    warp_sync: extern "C" fn(i32),
    shuffle: extern "C" fn(u32, i32, i32) -> u32,
    ballot: extern "C" fn(u32, i32) -> u64,
    match_any: extern "C" fn(u32, i32, i32) -> u64,
    warp_max: extern "C" fn(u32, i32) -> u32,
    shared_add: unsafe extern "C" fn(*mut i32, i32, *const c_void),
    matrix_product: unsafe extern "C" fn(Shape, *const u32, *const u32, *mut f32, i32),
    dynamic_shared: extern "C" fn() -> *mut c_void,
    access: extern "C" fn(*const c_void, u64, i32, *const c_void),
    defect: extern "C" fn(i32, *const u8, u64),
}

/// The only table; the calling thread of the host determines the worker.
pub(crate) static MACHINE: MachineTable = MachineTable {
    thread_index,
    block_x,
    block_y,
    block_sync,
    warp_sync,
    shuffle,
    ballot,
    match_any,
    warp_max,
    shared_add,
    matrix_product,
    dynamic_shared,
    access,
    defect,
};

extern "C" fn thread_index() -> i32 {
    // SAFETY: called by a kernel; the reference ends here.
    unsafe { current().block.current as i32 }
}

extern "C" fn block_x() -> i64 {
    // SAFETY: as above.
    unsafe { current().block.x }
}

extern "C" fn block_y() -> i64 {
    // SAFETY: as above.
    unsafe { current().block.y }
}

extern "C" fn dynamic_shared() -> *mut c_void {
    // SAFETY: as above.
    unsafe { current().dynamic_shared() }
}

extern "C" fn block_sync(line: i32) {
    // SAFETY: called by a kernel; the reference ends before `park`.
    let worker = unsafe { current() };
    worker.block.arrived += 1;
    if worker.block.arrived < worker.block.threads() {
        return park(State::Barrier(line));
    }
    // The last thread does not park: it wakes the others and goes on itself, so
    // a barrier costs one switch per thread.
    worker.block.arrived = 0;
    let threads = worker.block.threads();
    worker.block.wake(0..threads);
    worker.count_block_barrier();
}

extern "C" fn warp_sync(line: i32) {
    meet(Collective::Sync, line, 0, |_| {});
}

extern "C" fn shuffle(value: u32, lane: i32, line: i32) -> u32 {
    let brought = u64::from(lane as u32) << 32 | u64::from(value);
    meet(Collective::Shuffle, line, brought, |lanes| {
        let all = lanes.brought.len();
        // The lane number wraps as on the GPU, where `ds_bpermute_b32` takes it
        // modulo the lanes of a wave (CDNA3 ISA guide, DS_BPERMUTE_B32).
        for (to, from) in lanes.results.iter_mut().zip(lanes.brought) {
            *to = lanes.brought[(from >> 32) as usize & (all - 1)] & 0xffff_ffff;
        }
    }) as u32
}

extern "C" fn ballot(vote: u32, line: i32) -> u64 {
    meet(Collective::Ballot, line, u64::from(vote), |lanes| {
        let votes = lanes.brought.iter().enumerate();
        let all = votes.fold(0, |all, (lane, vote)| all | u64::from(*vote != 0) << lane);
        lanes.results.fill(all);
    })
}

extern "C" fn match_any(value: u32, bits: i32, line: i32) -> u64 {
    // The text promises a number of bits, which lets the GPU version compare
    // bit by bit. A larger value would match wrongly there, but not here.
    if u64::from(value) >> bits != 0 {
        fail(Fault::Wide { value, bits, line });
    }
    meet(Collective::MatchAny, line, u64::from(value), |lanes| {
        for (to, own) in lanes.results.iter_mut().zip(lanes.brought) {
            let others = lanes.brought.iter().enumerate();
            *to = others.fold(0, |same, (lane, value)| {
                same | u64::from(value == own) << lane
            });
        }
    })
}

extern "C" fn warp_max(value: u32, line: i32) -> u32 {
    meet(Collective::Max, line, u64::from(value), |lanes| {
        let most = lanes.brought.iter().copied().max().unwrap_or(0);
        lanes.results.fill(most);
    }) as u32
}

unsafe extern "C" fn shared_add(counter: *mut i32, value: i32, from: *const c_void) {
    check(counter as usize, 4, AccessKind::Atomic, from as usize);
    // SAFETY: the check has found the counter in memory of the launch; fibers
    // of other cores may add to it at the same time.
    let counter = unsafe { std::sync::atomic::AtomicI32::from_ptr(counter) };
    counter.fetch_add(value, std::sync::atomic::Ordering::Relaxed);
}

unsafe extern "C" fn matrix_product(
    shape: Shape,
    a: *const u32,
    b: *const u32,
    sums: *mut f32,
    line: i32,
) {
    // SAFETY: called by a kernel; the references end before `meet`.
    let worker = unsafe { current() };
    let Some(product) = worker.product(shape) else {
        fail(Fault::NoProduct { shape, line });
    };
    let operands = Operands { a, b, sums };
    let brought = std::ptr::from_ref(&operands) as u64;
    let agree = meet(Collective::Product(shape), line, brought, |lanes| {
        // SAFETY: each lane brings operands on its own stack, where it waits;
        // the text declares them with the registers of the kind.
        let agree = unsafe { product.run(lanes.brought) };
        lanes.results.fill(u64::from(agree));
    });
    if agree == 0 {
        fail(Fault::Halves { line });
    }
}

extern "C" fn access(address: *const c_void, bytes: u64, kind: i32, from: *const c_void) {
    let (address, bytes) = (address as usize, bytes as usize);
    let free = kind & 2 != 0 || bytes > 16;
    let aligned = free || address.is_multiple_of(bytes.max(1));
    let along = kind & 4 != 0;
    let kind = if kind & 1 != 0 {
        AccessKind::Write
    } else {
        AccessKind::Read
    };
    let from = from as usize;
    let access = Access {
        address,
        bytes,
        kind,
        from,
    };
    if !aligned {
        fail(Fault::Memory(access, Problem::Misaligned));
    }
    if !along {
        return check(address, bytes, kind, from);
    }
    // SAFETY: called by a kernel; the reference ends before `fail`.
    if let Some(fault) = unsafe { current().read_along(access) } {
        fail(fault);
    }
}

extern "C" fn defect(kind: i32, facts: *const u8, value: u64) {
    fail(Fault::Defect { kind, facts, value });
}

#[inline]
fn check(address: usize, bytes: usize, kind: AccessKind, from: usize) {
    let access = Access {
        address,
        bytes,
        kind,
        from,
    };
    // SAFETY: called by a kernel; the reference ends before `fail`.
    if let Some(fault) = unsafe { current().access(access) } {
        fail(fault);
    }
}

/// The operands of the lanes of a wave, and room for their results.
struct Lanes<'a> {
    brought: &'a [u64],
    results: &'a mut [u64],
}

/// Runs a collective: the last lane to arrive computes for all.
fn meet(what: Collective, line: i32, brought: u64, resolve: impl FnOnce(Lanes<'_>)) -> u64 {
    // SAFETY: called by a kernel; the reference ends before `park` and `fail`.
    let worker = unsafe { current() };
    let (block, here) = (&mut worker.block, (what, line));
    let (lane, count, thread) = (block.lane(), block.lanes, block.current);
    let wave = block.wave();
    // A wave executes in lockstep on the GPU, so its lanes cannot be in two
    // collectives. Compiled for the host, each lane runs alone and may get
    // there.
    if wave.arrived != 0 && wave.meeting != here {
        let (there, lane) = (wave.meeting, wave.arrived.trailing_zeros() as usize);
        fail(Fault::Apart { here, there, lane });
    }
    wave.meeting = here;
    wave.values[lane] = brought;
    wave.arrived |= 1 << lane;
    if wave.arrived != u64::MAX >> (64 - count) {
        park(State::Wave(what, line));
        // SAFETY: as above, and this fiber runs again.
        return unsafe { current().block.wave().results[lane] };
    }
    // Cleared before the others run: a lane may come to its next collective
    // while some still have to fetch this result. Their results stay in place
    // until all lanes have come again.
    wave.arrived = 0;
    resolve(Lanes {
        brought: &wave.values[..count],
        results: &mut wave.results[..count],
    });
    let result = wave.results[lane];
    let first = thread - lane;
    block.wake(first..first + count);
    worker.counts.collectives += 1;
    if what == Collective::Sync {
        worker.count_wave_barrier();
    }
    result
}

//! Each check of the machine, on PTX that has the defect and on the corrected
//! PTX.

use crate::common;
use crate::common::Run;
use moesaic_ptx::{Finding, FindingKind};

fn found(run: &Run, body: &str) -> Finding {
    match run.run(body) {
        Err(finding) => *finding,
        Ok(_) => panic!("nothing was found in\n{body}"),
    }
}

fn clean(run: &Run, body: &str) -> common::Left {
    run.run(body)
        .unwrap_or_else(|finding| panic!("{finding}\n{body}"))
}

fn expect(run: &Run, body: &str, kind: FindingKind, words: &str) -> Finding {
    let finding = found(run, body);
    assert_eq!(finding.kind, kind, "{finding}");
    let text = finding.to_string();
    assert!(text.contains(words), "`{words}` is not in: {text}");
    finding
}

fn two_warps() -> Run {
    Run {
        threads: 64,
        ..Run::default()
    }
}

/// Thread t writes word t of shared memory and reads that of the other warp.
fn exchange(between: &str) -> String {
    format!(
        "mov.u32 %r2, st;\nshl.b32 %r3, %r1, 2;\nadd.u32 %r4, %r2, %r3;\n\
         st.shared.u32 [%r4], %r1;\n{between}\n\
         xor.b32 %r5, %r1, 32;\nshl.b32 %r5, %r5, 2;\nadd.u32 %r5, %r2, %r5;\n\
         ld.shared.u32 %r6, [%r5];\n\
         cvt.u64.u32 %rd2, %r3;\nadd.u64 %rd3, %rd1, %rd2;\nst.global.u32 [%rd3], %r6;"
    )
}

#[test]
fn a_barrier_orders_shared_memory() {
    let left = clean(&two_warps(), &exchange("bar.sync 0;"));
    assert_eq!(left.words[5], 37);
    assert_eq!(left.words[37], 5);
    clean(&two_warps(), &exchange("bar.sync 3, 64;"));
    clean(&two_warps(), &exchange("barrier.sync.aligned 1;"));
}

#[test]
fn a_missing_barrier_is_a_race_or_an_uninitialised_read() {
    for seed in 0..4 {
        let run = Run {
            seed,
            ..two_warps()
        };
        let finding = found(&run, &exchange(""));
        let kinds = [FindingKind::SharedRace, FindingKind::UninitialisedShared];
        assert!(kinds.contains(&finding.kind), "{finding}");
    }
    let finding = found(&two_warps(), &exchange("bar.warp.sync -1;"));
    assert!(
        finding.to_string().contains("shared memory at 0x"),
        "{finding}"
    );
}

#[test]
fn a_write_after_a_read_needs_a_barrier_too() {
    let body = |between: &str| {
        format!(
            "mov.u32 %r2, st;\nsetp.lt.u32 %p1, %r1, 32;\n\
             @%p1 st.shared.u32 [%r2], %r1;\nbar.sync 0;\n\
             ld.shared.u32 %r6, [%r2];\n{between}\nsetp.eq.u32 %p2, %r1, 40;\n\
             @%p2 st.shared.u32 [%r2], %r1;"
        )
        .replace(
            "@%p1 st.shared.u32 [%r2], %r1",
            "setp.eq.u32 %p3, %r1, 0;\n@%p3 st.shared.u32 [%r2], %r1",
        )
    };
    clean(&two_warps(), &body("bar.sync 0;"));
    expect(
        &two_warps(),
        &body(""),
        FindingKind::SharedRace,
        "nothing orders the two",
    );
}

#[test]
fn lanes_of_a_warp_race_without_a_warp_barrier() {
    let body = |between: &str| {
        format!(
            "mov.u32 %r2, st;\nshl.b32 %r3, %r1, 2;\nadd.u32 %r4, %r2, %r3;\n\
             st.shared.u32 [%r4], %r1;\n{between}\nxor.b32 %r5, %r3, 4;\n\
             add.u32 %r5, %r5, %r2;\nld.shared.u32 %r6, [%r5];"
        )
    };
    clean(&Run::default(), &body("bar.warp.sync -1;"));
    let finding = expect(
        &Run::default(),
        &body(""),
        FindingKind::SharedRace,
        "thread 1 writes",
    );
    assert_eq!(finding.threads, [0]);
}

#[test]
fn halves_of_a_word_belong_to_their_threads() {
    let body = "mov.u32 %r2, st;\nshl.b32 %r3, %r1, 1;\nadd.u32 %r4, %r2, %r3;\n\
                cvt.u16.u32 %h1, %r1;\nst.shared.u16 [%r4], %h1;\n";
    clean(&two_warps(), body);
    let after = format!(
        "{body}bar.sync 0;\nxor.b32 %r5, %r3, 64;\nadd.u32 %r5, %r5, %r2;\nld.shared.u16 %h2, [%r5];\n"
    );
    clean(&two_warps(), &after);
    let wide = format!("{body}ld.shared.u16 %h2, [%r2+6];\n");
    expect(
        &two_warps(),
        &wide,
        FindingKind::SharedRace,
        "reads 2 bytes",
    );
}

#[test]
fn atomics_on_shared_memory_do_not_race() {
    let add = "mov.u32 %r2, st;\nsetp.eq.u32 %p1, %r1, 0;\nmov.u32 %r7, 0;\n\
               @%p1 st.shared.u32 [%r2], %r7;\nbar.sync 0;\n\
               atom.shared.add.u32 %r3, [%r2], 1;\n";
    let read = "ld.shared.u32 %r4, [%r2];\nst.global.u32 [%rd1], %r4;\n";
    let left = clean(&two_warps(), &format!("{add}bar.sync 0;\n{read}"));
    assert_eq!(left.words[0], 64);
    expect(
        &two_warps(),
        &format!("{add}{read}"),
        FindingKind::SharedRace,
        "reads 4 bytes",
    );
}

#[test]
fn bounds_and_alignment_name_the_place() {
    let run = Run {
        words: 100,
        input: vec![0; 100],
        ..Run::default()
    };
    let finding = expect(
        &run,
        "ld.global.u32 %r2, [%rd1+408];",
        FindingKind::OutOfBounds,
        "8 bytes past the end of an allocation of 400 bytes",
    );
    assert_eq!(finding.threads.len(), 1);
    expect(
        &run,
        "ld.global.v4.u32 {%r2,%r3,%r4,%r5}, [%rd1+360];",
        FindingKind::Misaligned,
        "no multiple of 16",
    );
    expect(
        &run,
        "st.shared.u32 [st+5000], %r1;",
        FindingKind::OutOfBounds,
        "shared memory",
    );
    expect(
        &run,
        "ld.shared.u32 %r2, [st+2];",
        FindingKind::Misaligned,
        "no multiple of 4",
    );
    expect(
        &run,
        "mov.u64 %rd2, 0;\nld.global.u32 %r2, [%rd2];",
        FindingKind::OutOfBounds,
        "before",
    );
}

#[test]
fn reads_of_nothing_are_found() {
    let run = Run {
        words: 100,
        input: vec![7; 50],
        ..Run::default()
    };
    clean(&run, "ld.global.u32 %r2, [%rd1+196];");
    let what = "nothing has written, at byte 200 of an allocation of 400 bytes";
    expect(
        &run,
        "ld.global.u32 %r2, [%rd1+200];",
        FindingKind::UninitialisedGlobal,
        what,
    );
    clean(
        &run,
        "st.global.u32 [%rd1+200], %r1;\nbar.warp.sync -1;\nld.global.u32 %r2, [%rd1+200];"
            .replace("[%rd1+200], %r1", "[%rd1+200], 5")
            .as_str(),
    );
    expect(
        &run,
        "ld.shared.u32 %r2, [st+8];",
        FindingKind::UninitialisedShared,
        "nothing has written",
    );
}

#[test]
fn blocks_must_not_share_global_memory() {
    let run = |workers| Run {
        grid: [4, 1],
        workers,
        ..Run::default()
    };
    let own = "mov.u32 %r2, %ctaid.x;\nmad.lo.u32 %r3, %r2, 32, %r1;\n\
               mul.wide.u32 %rd2, %r3, 4;\nadd.u64 %rd3, %rd1, %rd2;\nst.global.u32 [%rd3], %r2;";
    clean(&run(2), own);
    for workers in [1, 2, 3] {
        let body = own.replace("%r2, 32", "%r2, 31");
        let finding = expect(
            &run(workers),
            &body,
            FindingKind::GlobalRace,
            "block (0, 0, 0) writes",
        );
        assert!(
            finding.message.contains("block (3, 0, 0) writes"),
            "{finding}"
        );
        assert!(finding.message.contains("byte 124 of"), "{finding}");
    }
    let reads = format!("{own}\nld.global.u32 %r4, [%rd1+256];");
    expect(&run(2), &reads, FindingKind::GlobalRace, "reads");
    let atomics = "red.global.add.u32 [%rd1], 1;";
    let left = clean(&run(2), atomics);
    assert_eq!(left.words[0], 128);
}

#[test]
fn threads_of_a_block_race_in_global_memory() {
    let body = |between: &str| {
        format!(
            "mul.wide.u32 %rd2, %r1, 4;\nadd.u64 %rd3, %rd1, %rd2;\nst.global.u32 [%rd3], %r1;\n\
             {between}\nxor.b32 %r2, %r1, 32;\nmul.wide.u32 %rd2, %r2, 4;\n\
             add.u64 %rd3, %rd1, %rd2;\nld.global.u32 %r3, [%rd3];"
        )
    };
    clean(&two_warps(), &body("bar.sync 0;"));
    expect(
        &two_warps(),
        &body(""),
        FindingKind::GlobalRace,
        "nothing orders the two",
    );
}

#[test]
fn warps_must_come_whole() {
    let body = "setp.lt.u32 %p1, %r1, 16;\n@%p1 bar.sync 0;";
    let finding = expect(
        &Run::default(),
        body,
        FindingKind::PartialWarp,
        "threads 0-15 came",
    );
    assert_eq!(finding.threads.len(), 16);
    let lost =
        "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra L;\nshfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\nL:";
    expect(
        &Run::default(),
        lost,
        FindingKind::PartialWarp,
        "threads 16-31 came",
    );
    let half = lost.replace("-1;", "0xffff0000;");
    clean(&Run::default(), &half);
    let without = lost.replace("-1;", "0xff;");
    expect(
        &Run::default(),
        &without,
        FindingKind::LaneMask,
        "which it is not part of",
    );
}

#[test]
fn lanes_that_ended_are_missing() {
    let body = "setp.lt.u32 %p1, %r1, 16;\n@%p1 ret;\nbar.warp.sync -1;";
    let words = "threads 0-15 ended";
    expect(&Run::default(), body, FindingKind::PartialWarp, words);
    let body = body.replace("bar.warp.sync -1;", "bar.sync 0;");
    expect(&Run::default(), &body, FindingKind::PartialWarp, words);
    let body = body.replace("bar.sync 0;", "bar.warp.sync 0xffff0000;");
    clean(&Run::default(), &body);
    // Lanes that the block does not have do not count as missing.
    let run = Run {
        threads: 48,
        ..Run::default()
    };
    clean(&run, "bar.warp.sync -1;\nbar.sync 0;");
}

#[test]
fn lanes_may_meet_at_different_warp_barriers() {
    let body = "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra L;\nbar.warp.sync -1;\nbra M;\n\
                L: bar.warp.sync -1;\nM: st.global.u32 [%rd1], 3;";
    clean(&Run::default(), body);
}

#[test]
fn deadlocks_list_who_waits() {
    let body =
        "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra L;\nbar.sync 1, 64;\nbra M;\nL: bar.sync 2, 64;\nM:";
    let finding = expect(
        &two_warps(),
        body,
        FindingKind::Deadlock,
        "where 32 of 64 threads have come",
    );
    assert!(
        finding.message.contains("threads 32-63: wait at barrier 1"),
        "{finding}"
    );
    let gone = "setp.lt.u32 %p1, %r1, 32;\n@%p1 ret;\nbar.sync 0;";
    expect(
        &two_warps(),
        gone,
        FindingKind::Deadlock,
        "32 of 64 threads",
    );
    let spin = "L: ld.volatile.global.u32 %r2, [%rd1];\nsetp.eq.u32 %p1, %r2, 0;\n@%p1 bra L;";
    expect(&Run::default(), spin, FindingKind::Deadlock, "spin");
}

#[test]
fn barriers_are_used_alike() {
    let body =
        "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra L;\nbar.sync 1, 64;\nbra M;\nL: bar.sync 1, 96;\nM:";
    let run = Run {
        threads: 96,
        ..Run::default()
    };
    expect(&run, body, FindingKind::Barrier, "barrier 1 is used with");
    expect(
        &two_warps(),
        "bar.sync 1, 48;",
        FindingKind::Barrier,
        "multiple of 32",
    );
    expect(
        &two_warps(),
        "mov.u32 %r2, 16;\nbar.sync %r2;",
        FindingKind::Barrier,
        "0 to 15",
    );
}

#[test]
fn arrivals_order_what_came_before() {
    let body = |arrive: &str| {
        format!(
            "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra L;\nst.shared.u32 [st], 9;\n{arrive}\nbra M;\n\
             L: bar.sync 1, 64;\nld.shared.u32 %r2, [st];\nM:"
        )
        .replace(
            "st.shared.u32 [st], 9",
            "setp.eq.u32 %p2, %r1, 32;\n@%p2 st.shared.u32 [st], 9",
        )
    };
    clean(&two_warps(), &body("bar.arrive 1, 64;"));
    let late = body("bar.arrive 1, 64;\n@%p2 st.shared.u32 [st], 8;");
    let finding = found(&two_warps(), &late);
    assert_eq!(finding.kind, FindingKind::SharedRace, "{finding}");
}

const COPY: &str = "mov.u32 %r2, st;\nshl.b32 %r3, %r1, 4;\nadd.u32 %r4, %r2, %r3;\n\
                    cvt.u64.u32 %rd2, %r3;\nadd.u64 %rd3, %rd1, %rd2;\n\
                    cp.async.cg.shared.global [%r4], [%rd3], 16;\ncp.async.commit_group;\n";

#[test]
fn copies_are_waited_for() {
    let run = Run {
        input: (0..4096).collect(),
        ..Run::default()
    };
    let read =
        "ld.shared.u32 %r5, [%r4+8];\nadd.u64 %rd4, %rd3, 8192;\nst.global.u32 [%rd4], %r5;\n";
    let left = clean(&run, &format!("{COPY}cp.async.wait_group 0;\n{read}"));
    assert_eq!(left.words[2048 + 4 * 7], 4 * 7 + 2);
    let early = format!("{COPY}cp.async.wait_group 1;\n{read}cp.async.wait_all;");
    expect(
        &run,
        &early,
        FindingKind::CopyInFlight,
        "has not been waited for",
    );
    let others = format!(
        "{COPY}cp.async.wait_all;\nxor.b32 %r6, %r3, 16;\nadd.u32 %r6, %r6, %r2;\nld.shared.u32 %r5, [%r6];"
    );
    expect(
        &run,
        &others,
        FindingKind::SharedRace,
        "nothing orders the two",
    );
    expect(&run, COPY, FindingKind::PendingAtExit, "cp.async");
}

#[test]
fn copies_fill_with_zeros() {
    let run = Run {
        input: vec![0xabcd_abcd; 4096],
        ..Run::default()
    };
    let body = COPY
        .replace(", 16;", ", 16, %r9;")
        .replace("mov.u32 %r2, st;", "mov.u32 %r2, st;\nmov.u32 %r9, 6;");
    let body = format!(
        "{body}cp.async.wait_all;\nld.shared.v4.u32 {{%r5,%r6,%r7,%r8}}, [%r4];\nst.global.v4.u32 [%rd3], {{%r5,%r6,%r7,%r8}};"
    );
    assert_eq!(clean(&run, &body).words[..4], [0xabcd_abcd, 0xabcd, 0, 0]);
}

#[test]
fn launches_larger_than_the_machine_are_refused() {
    let run = Run {
        shared_bytes: 240 << 10,
        ..Run::default()
    };
    expect(&run, "", FindingKind::SharedSize, "a block asks for");
    let run = Run {
        shared_bytes: 200 << 10,
        ..Run::default()
    };
    clean(
        &run,
        "mov.u32 %r2, sm;\nst.shared.u32 [%r2+204796], 1;"
            .replace("st.shared", "setp.eq.u32 %p1, %r1, 3;\n@%p1 st.shared")
            .as_str(),
    );
}

#[test]
fn traps_and_unknown_instructions_are_named() {
    expect(&Run::default(), "trap;", FindingKind::Trap, "gave up");
    let text = common::kernel("vadd.s32.s32.s32 %r2, %r1, %r1;");
    let device = moesaic_ptx::PtxDevice::new(
        moesaic_kernel::CudaArch {
            capability: 90,
            suffix: None,
        },
        moesaic_ptx::PtxOptions::default(),
    );
    let loaded =
        moesaic_target::Device::load(&device, &moesaic_ptx::artifact_of_ptx(&text, ""), &[]);
    let Err(error) = loaded else {
        panic!("loaded an unknown instruction")
    };
    let error = error.to_string();
    assert!(
        error.contains("`vadd.s32.s32.s32` is not covered by the simulator"),
        "{error}"
    );
}

#[test]
fn counters_see_conflicts_and_coalescing() {
    let body = |stride: u32| {
        format!(
            "mul.lo.u32 %r3, %r1, {stride};\nmov.u32 %r2, st;\nadd.u32 %r4, %r2, %r3;\nst.shared.u32 [%r4], %r1;\n\
             cvt.u64.u32 %rd2, %r3;\nadd.u64 %rd3, %rd1, %rd2;\nst.global.u32 [%rd3], %r1;\nld.global.nc.v4.u32 {{%r5,%r6,%r7,%r8}}, [%rd1+8192];"
        )
    };
    let counters = clean(&Run::default(), &body(4)).counters;
    assert_eq!(counters.shared.bank_conflicts(), 0);
    assert_eq!(counters.global_stores.sectors_per_request(), 4.0);
    assert_eq!(counters.global_widths, [0, 0, 1, 0, 1]);
    assert_eq!(counters.global_loads.sectors, 1);
    let counters = clean(&Run::default(), &body(128)).counters;
    assert_eq!(counters.shared.bank_conflicts(), 31);
    assert_eq!(counters.global_stores.sectors_per_request(), 32.0);
    assert_eq!((counters.launches, counters.blocks), (1, 1));
}

/// A kernel of many blocks with divergence, shared memory and copies.
#[test]
fn nothing_depends_on_cores_or_delays() {
    let body = "mov.u32 %r2, %ctaid.x;\nmad.lo.u32 %r3, %r2, 64, %r1;\nmul.wide.u32 %rd2, %r3, 4;\n\
                add.u64 %rd3, %rd1, %rd2;\nmov.u32 %r4, st;\nshl.b32 %r5, %r1, 2;\nadd.u32 %r6, %r4, %r5;\n\
                cp.async.ca.shared.global [%r6], [%rd3], 4;\ncp.async.wait_all;\nbar.sync 0;\n\
                xor.b32 %r7, %r5, 132;\nadd.u32 %r7, %r4, %r7;\nld.shared.u32 %r8, [%r7];\n\
                and.b32 %r9, %r8, 7;\nL: setp.eq.u32 %p1, %r9, 0;\n@%p1 bra D;\nadd.u32 %r8, %r8, %r9;\n\
                sub.u32 %r9, %r9, 1;\nbra L;\nD: bar.warp.sync -1;\nst.global.u32 [%rd3+8192], %r8;";
    let run = |seed, workers| Run {
        threads: 64,
        grid: [16, 2],
        input: (0..2048).map(|i| i * 7919 % 1000).collect(),
        seed,
        workers,
        ..Run::default()
    };
    let grid_of_one = |run: Run| Run {
        grid: [32, 1],
        ..run
    };
    let first = clean(&grid_of_one(run(1, 1)), body);
    for (seed, workers) in [(1, 2), (1, 5), (0, 1), (9, 3)] {
        let other = clean(&grid_of_one(run(seed, workers)), body);
        assert_eq!(first.words, other.words, "seed {seed}, {workers} cores");
        assert_eq!(
            first.counters, other.counters,
            "seed {seed}, {workers} cores"
        );
    }
    // Two rows of blocks write the same words.
    let findings: Vec<_> = [1, 2, 5]
        .map(|workers| found(&run(1, workers), body))
        .into();
    assert_eq!(findings[0], findings[1]);
    assert_eq!(findings[0], findings[2]);
}

#[test]
fn a_dependent_launch_waits_before_it_touches_global_memory() {
    const WAIT: &str = "griddepcontrol.launch_dependents;\ngriddepcontrol.wait;\n";
    let run = Run {
        dependent: true,
        ..two_warps()
    };
    let load = "ld.global.u32 %r2, [%rd1];\n";
    clean(&run, &format!("{WAIT}{load}"));
    let copy = "mov.u32 %r2, st;\ncp.async.ca.shared.global [%r2], [%rd1], 4;\n\
                cp.async.wait_all;\n";
    let early = [
        load,
        "st.global.u32 [%rd1], 1;\n",
        "red.global.add.u32 [%rd1], 1;\n",
        copy,
    ];
    for access in early {
        let body = format!("{access}{WAIT}");
        expect(
            &run,
            &body,
            FindingKind::LaunchOrder,
            "before `griddepcontrol.wait`",
        );
    }
    let forgotten = "ends without having waited";
    expect(&run, "", FindingKind::LaunchOrder, forgotten);
    let one_warp = format!("setp.lt.u32 %p1, %r1, 32;\n@!%p1 bra D;\n{WAIT}D:\n");
    expect(&run, &one_warp, FindingKind::LaunchOrder, forgotten);
    // A launch after the end of those before has nothing to wait for.
    clean(&two_warps(), &format!("{load}{WAIT}"));
    clean(&two_warps(), load);
}

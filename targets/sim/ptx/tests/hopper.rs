//! mbarriers, bulk copies, products of warpgroups and clusters in hand-written
//! PTX: correct, and with one defect.

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

fn expect(run: &Run, body: &str, kind: FindingKind, words: &str) {
    let finding = found(run, body);
    assert_eq!(finding.kind, kind, "{finding}");
    let text = finding.to_string();
    assert!(text.contains(words), "`{words}` is not in: {text}");
}

fn counted() -> Run {
    Run {
        threads: 64,
        input: (0..4096).collect(),
        ..Run::default()
    }
}

/// Thread 0 sets up a barrier and loads 1024 bytes; every thread waits and
/// reads.
const LOAD: &str = "
    mov.u32 %r2, st;  add.u32 %r3, %r2, 2048;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r3], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    @%p1 bra WAIT;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 1024;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 1024, [%r3];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
    @!%p2 bra WAIT;
    shl.b32 %r4, %r1, 4;  add.u32 %r5, %r2, %r4;
    ld.shared.u32 %r6, [%r5];
    cvt.u64.u32 %rd2, %r4;  add.u64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3+8192], %r6;
";

#[test]
fn bulk_loads_arrive_at_their_barrier() {
    for seed in 0..5 {
        let run = Run { seed, ..counted() };
        let left = clean(&run, LOAD);
        assert_eq!(left.words[2048 + 4 * 63], 4 * 63);
        assert_eq!(left.counters.async_load_bytes, 1024);
    }
}

/// Returns true for a read before the copy has arrived, or before it is issued.
fn early(finding: &Finding) -> bool {
    matches!(
        finding.kind,
        FindingKind::CopyInFlight | FindingKind::UninitialisedShared
    )
}

#[test]
fn bulk_loads_are_waited_for() {
    let body = LOAD
        .replace("@!%p2 bra WAIT;", "")
        .replace("mbarrier.try_wait", "mbarrier.test_wait");
    let finding = found(&counted(), &body);
    assert!(early(&finding), "{finding}");
    let wrong_phase = LOAD.replace("[%r3], 0;\n    @!", "[%r3], 1;\n    @!");
    let finding = found(&counted(), &wrong_phase);
    assert!(early(&finding), "{finding}");
}

#[test]
fn expected_bytes_are_the_bytes_that_come() {
    let more = LOAD.replace("[%r3], 1024;", "[%r3], 1040;");
    expect(&counted(), &more, FindingKind::Deadlock, "and 16 bytes");
    let two = LOAD.replace(
        "1024, [%r3];",
        "512, [%r3];\ncp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+512], [%rd1], 512, [%r3];",
    );
    clean(&counted(), &two);
    let fewer = two.replace("[%r3], 1024;", "[%r3], 512;");
    let finding = found(&counted(), &fewer);
    assert_eq!(finding.kind, FindingKind::Mbarrier, "{finding}");
}

#[test]
fn barriers_are_set_up_before_they_are_used() {
    let no_sync = LOAD.replace("bar.sync 0;", "");
    let finding = found(&counted(), &no_sync);
    assert!(
        matches!(
            finding.kind,
            FindingKind::Mbarrier | FindingKind::SharedRace
        ),
        "{finding}"
    );
    let no_fence = LOAD.replace("fence.mbarrier_init.release.cluster;", "");
    expect(
        &counted(),
        &no_fence,
        FindingKind::MissingProxyFence,
        "lets TMA use",
    );
    let twice = LOAD.replace(
        "fence.mbarrier",
        "mbarrier.init.shared::cta.b64 [%r3], 1;\nfence.mbarrier",
    );
    expect(&counted(), &twice, FindingKind::Mbarrier, "mbarrier at");
    let often = LOAD.replace("@%p1 bra WAIT;\n", "");
    let finding = found(&counted(), &often);
    assert_eq!(finding.kind, FindingKind::Mbarrier, "{finding}");
}

#[test]
fn bulk_copies_are_aligned() {
    let body = LOAD.replace("[%r2], [%rd1], 1024", "[%r2+8], [%rd1], 1024");
    expect(
        &counted(),
        &body,
        FindingKind::Misaligned,
        "no multiple of 16",
    );
    let body = LOAD.replace("[%r2], [%rd1], 1024", "[%r2], [%rd1+16000], 1024");
    expect(&counted(), &body, FindingKind::OutOfBounds, "past the end");
}

/// Every thread writes 16 bytes; thread 0 stores them all.
const STORE: &str = "
    mov.u32 %r2, st;  shl.b32 %r4, %r1, 4;  add.u32 %r5, %r2, %r4;
    st.shared.v4.u32 [%r5], {%r1, %r1, %r1, %r1};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 1024;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
DONE:
";

#[test]
fn bulk_stores_read_what_was_fenced() {
    for seed in 0..4 {
        let run = Run { seed, ..counted() };
        let left = clean(&run, STORE);
        assert_eq!(left.words[4 * 63..][..4], [63; 4]);
    }
    let no_fence = STORE.replace("fence.proxy.async.shared::cta;", "");
    expect(
        &counted(),
        &no_fence,
        FindingKind::MissingProxyFence,
        "no fence.proxy.async",
    );
    let after = no_fence.replace("@%p1 bra DONE;", "@%p1 bra DONE;\nfence.proxy.async;");
    clean(&counted(), &after);
    let no_barrier = STORE.replace("bar.sync 0;", "");
    let finding = found(&counted(), &no_barrier);
    assert!(
        matches!(
            finding.kind,
            FindingKind::SharedRace | FindingKind::UninitialisedShared
        ),
        "{finding}"
    );
}

#[test]
fn bulk_stores_are_waited_for() {
    let no_wait = STORE.replace("cp.async.bulk.wait_group.read 0;", "");
    expect(
        &counted(),
        &no_wait,
        FindingKind::PendingAtExit,
        "bulk stores",
    );
    let early = STORE.replace(
        "cp.async.bulk.wait_group.read 0;",
        "st.shared.u32 [%r2], %r1;\ncp.async.bulk.wait_group.read 0;",
    );
    expect(
        &counted(),
        &early,
        FindingKind::CopyInFlight,
        "may still read",
    );
    let late = STORE.replace(
        "cp.async.bulk.wait_group.read 0;",
        "cp.async.bulk.wait_group.read 0;\nst.shared.u32 [%r2], %r1;",
    );
    clean(&counted(), &late);
}

#[test]
fn bulk_reductions_add() {
    let body = STORE.replace(
        "cp.async.bulk.global.shared::cta.bulk_group [%rd1]",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1]",
    );
    let left = clean(&counted(), &body);
    assert_eq!(left.words[4 * 5 + 1], 4 * 5 + 1 + 5);
}

#[test]
fn copies_signal_barriers() {
    let body = "
        mov.u32 %r2, st;  add.u32 %r3, %r2, 2048;  shl.b32 %r4, %r1, 4;  add.u32 %r5, %r2, %r4;
        setp.ne.u32 %p1, %r1, 0;
        @!%p1 mbarrier.init.shared::cta.b64 [%r3], 64;
        bar.sync 0;
        cvt.u64.u32 %rd2, %r4;  add.u64 %rd3, %rd1, %rd2;
        cp.async.cg.shared.global [%r5], [%rd3], 16;
        cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r3];
    WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
        @!%p2 bra WAIT;
        xor.b32 %r6, %r4, 48;  add.u32 %r6, %r2, %r6;
        ld.shared.u32 %r7, [%r6];
        st.global.u32 [%rd3+8192], %r7;
    ";
    assert_eq!(clean(&counted(), body).words[2048], 12);
    let finding = found(
        &counted(),
        &body
            .replace("@!%p2 bra WAIT;", "")
            .replace("try_wait", "test_wait"),
    );
    assert!(
        matches!(
            finding.kind,
            FindingKind::SharedRace | FindingKind::CopyInFlight | FindingKind::UninitialisedShared
        ),
        "{finding}"
    );
}

/// One m64n8k16 product of ones: operands are 3072 bytes that threads write.
fn product(fence: &str, proxy: &str, after: &str) -> String {
    format!(
        "mov.u32 %r2, sm;  shl.b32 %r4, %r1, 5;  add.u32 %r5, %r2, %r4;
         mov.u32 %r6, 0x3f803f80;
         st.shared.v4.u32 [%r5], {{%r6, %r6, %r6, %r6}};
         st.shared.v4.u32 [%r5+16], {{%r6, %r6, %r6, %r6}};
         {proxy}
         bar.sync 0;
         shr.u32 %r7, %r2, 4;  cvt.u64.u32 %rd2, %r7;
         mov.u64 %rd3, 0x0000000800080000;  or.b64 %rd4, %rd2, %rd3;
         mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f3F800000; mov.f32 %f3, 0f3F800000; mov.f32 %f4, 0f3F800000;
         setp.eq.u32 %p1, 0, 0;
         {fence}
         wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f1,%f2,%f3,%f4}}, %rd4, %rd4, %p1, 1, 1, 0, 0;
         wgmma.commit_group.sync.aligned;
         {after}
         shl.b32 %r8, %r1, 2;  cvt.u64.u32 %rd5, %r8;  add.u64 %rd6, %rd1, %rd5;
         st.global.f32 [%rd6], %f4;"
    )
}

fn warpgroup(seed: u64) -> Run {
    Run {
        threads: 128,
        shared_bytes: 4096,
        seed,
        ..Run::default()
    }
}

const FENCE: &str = "wgmma.fence.sync.aligned;";
const PROXY: &str = "fence.proxy.async;";
const WAIT: &str = "wgmma.wait_group.sync.aligned 0;";

#[test]
fn products_are_right_and_counted() {
    for seed in 0..4 {
        let left = clean(&warpgroup(seed), &product(FENCE, PROXY, WAIT));
        assert!(
            left.words[..128]
                .iter()
                .all(|word| *word == 17f32.to_bits())
        );
        assert_eq!(left.counters.tensor_multiply_adds, 64 * 8 * 16);
    }
}

#[test]
fn products_want_their_fences_and_waits() {
    let run = warpgroup(1);
    let in_flight = FindingKind::AccumulatorInFlight;
    expect(
        &run,
        &product("", PROXY, WAIT),
        in_flight,
        "since the last wgmma.fence",
    );
    expect(
        &run,
        &product(FENCE, PROXY, ""),
        in_flight,
        "has not been waited for",
    );
    expect(
        &run,
        &product(FENCE, "", WAIT),
        FindingKind::MissingProxyFence,
        "multiplies 16 bytes",
    );
    let early = format!("st.shared.u32 [%r5], %r6;\n{WAIT}");
    expect(
        &run,
        &product(FENCE, PROXY, &early),
        FindingKind::CopyInFlight,
        "a wgmma may still read",
    );
    let one_left = WAIT.replace('0', "1");
    expect(
        &run,
        &product(FENCE, PROXY, &one_left),
        in_flight,
        "reads a register",
    );
    let written = format!("mov.f32 %f2, 0f00000000;\n{WAIT}");
    expect(
        &run,
        &product(FENCE, PROXY, &written),
        in_flight,
        "writes a register",
    );
}

#[test]
fn products_stay_inside_shared_memory() {
    let body = product(FENCE, PROXY, WAIT).replace("0x0000000800080000", "0x0000020000080000");
    let finding = found(&warpgroup(1), &body);
    assert!(
        matches!(
            finding.kind,
            FindingKind::OutOfBounds | FindingKind::UninitialisedShared
        ),
        "{finding}"
    );
}

/// Each block writes its rank where the other one reads it.
fn cluster(barrier: &str) -> String {
    format!(
        "mov.u32 %r2, %cluster_ctarank;  xor.b32 %r3, %r2, 1;  mov.u32 %r4, st;
         setp.ne.u32 %p1, %r1, 0;
         mapa.shared::cluster.u32 %r5, %r4, %r3;
         add.u32 %r6, %r2, 70;
         @!%p1 st.shared::cluster.u32 [%r5], %r6;
         {barrier}
         ld.shared.u32 %r7, [%r4];
         mov.u32 %r8, %ctaid.x;  mul.wide.u32 %rd2, %r8, 4;  add.u64 %rd3, %rd1, %rd2;
         @!%p1 st.global.u32 [%rd3], %r7;"
    )
}

const CLUSTER: &str = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;";

#[test]
fn clusters_share_memory() {
    let run = Run {
        grid: [4, 1],
        cluster: 2,
        ..Run::default()
    };
    let left = clean(&run, &cluster(CLUSTER));
    assert_eq!(left.words[..4], [71, 70, 71, 70]);
    let finding = found(&run, &cluster("bar.sync 0;"));
    assert!(
        matches!(
            finding.kind,
            FindingKind::SharedRace | FindingKind::UninitialisedShared
        ),
        "{finding}"
    );
    let beyond = cluster(CLUSTER).replace("xor.b32 %r3, %r2, 1", "add.u32 %r3, %r2, 2");
    expect(
        &run,
        &beyond,
        FindingKind::OutOfBounds,
        "the cluster has 2 blocks",
    );
}

#[test]
fn cluster_barriers_are_used_in_turn() {
    let run = Run {
        grid: [2, 1],
        cluster: 2,
        ..Run::default()
    };
    let twice = "barrier.cluster.arrive.aligned;\nbarrier.cluster.arrive.aligned;";
    expect(&run, twice, FindingKind::Barrier, "twice without a wait");
    expect(
        &run,
        "barrier.cluster.wait.aligned;",
        FindingKind::Barrier,
        "without having arrived",
    );
}

/// Blocks of up to 1024 threads start with 64 registers for each.
const REGISTERS: &str = "
    setp.ge.u32 %p1, %r1, 128;
    @%p1 bra GROW;
    setmaxnreg.dec.sync.aligned.u32 40;
    bra DONE;
GROW:
    setmaxnreg.inc.sync.aligned.u32 88;
DONE:
    mov.u32 %r2, 1;
";

#[test]
fn a_warpgroup_takes_only_registers_that_another_has_given_back() {
    for seed in 0..4 {
        let run = Run {
            threads: 256,
            seed,
            ..Run::default()
        };
        clean(&run, REGISTERS);
        let more = REGISTERS.replace("u32 88", "u32 96");
        let words = "wait for 32 more registers of each thread";
        expect(&run, &more, FindingKind::Deadlock, words);
    }
}

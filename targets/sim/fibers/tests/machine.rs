//! Behaviour of the machine: barriers, collectives, blocks, memory.

mod common;

use common::*;
use moesaic_fibers::ThreadOrder;
use moesaic_kernel::*;
use moesaic_target::*;

fn out(name: &str) -> Param {
    Param::write(name, DType::I32, "[n]")
}

/// Returns each thread's answer to an expression, for two blocks of two waves.
fn answers(gpu: &str, expression: &str) -> Vec<u32> {
    let threads = 2 * arch(gpu).caps().wave;
    let body = format!(
        "KERNEL({threads}) k(u32 *y) {{ const i32 t = thread_index(); (void)t;\n\
         y[block_x() * {threads} + t] = (u32)({expression}); }}"
    );
    let kernel = Kernel::new(gpu, threads, vec![out("y")], &body);
    let mut buffers = [Data::room(2 * threads as usize)];
    kernel.run(2, &mut buffers).unwrap();
    buffers[0].words()
}

#[test]
fn collectives_are_of_one_wave() {
    for (gpu, wave) in [("gfx942", 64u32), ("gfx1100", 32)] {
        let check = |expression: &str, want: &dyn Fn(u32) -> u32| {
            let got = answers(gpu, expression);
            for (i, got) in got.iter().enumerate() {
                let thread = i as u32 % (2 * wave);
                assert_eq!(*got, want(thread), "{gpu}: {expression} of thread {thread}");
            }
        };
        let lane = |t: u32| t % wave;
        let base = |t: u32| t - t % wave;
        check("WARP", &|_| wave);
        check("shuffle((u32)t, t ^ 5)", &|t| base(t) + (lane(t) ^ 5));
        check("shuffle((u32)t, t + 1)", &|t| {
            base(t) + (lane(t) + 1) % wave
        });
        check("warp_max((u32)t * 7 % 64)", &|t| {
            (base(t)..base(t) + wave).map(|t| t * 7 % 64).max().unwrap()
        });
        check("population(ballot(t % 3 == 0))", &|t| {
            (base(t)..base(t) + wave).filter(|t| t % 3 == 0).count() as u32
        });
        check("match_any<3>((u32)t % 5) >> (WARP - 32)", &|t| {
            (wave - 32..wave).fold(0, |same, lane| {
                let other = base(t) + lane;
                same | u32::from(other % 5 == t % 5) << (lane + 32 - wave)
            })
        });
        check("warp_sum((i32)t)", &|t| (base(t)..base(t) + wave).sum());
        check("warp_prefix((i32)t)", &|t| (base(t)..=t).sum());
    }
}

/// Blocks over one core and over three, in every order of threads.
#[test]
fn cores_and_orders_do_not_show() {
    let body = "KERNEL(192) k(const f32 *x, f32 *y)\n{\n\
        \x20   __shared__ f32 sums[192 / WARP];\n\
        \x20   const f32 own = x[(block_x() * 7 + thread_index()) % 1000];\n\
        \x20   const f32 all = warp_sum(own);\n\
        \x20   if (lane_index() == 0)\n        sums[warp_index()] = all;\n    block_sync();\n\
        \x20   y[block_x() * 192 + thread_index()] = own * sums[(warp_index() + 1) % (192 / WARP)];\n}";
    let params = || vec![Param::read("x", DType::F32, "[n]"), out("y")];
    let x: Vec<f32> = (0..1000).map(|i| (i as f32).sin()).collect();
    for gpu in ["gfx942", "gfx1100"] {
        let kernel = Kernel::new(gpu, 192, params(), body);
        let result = |threads: usize, order: ThreadOrder| {
            let mut buffers = [Data::floats(&x), Data::room(192 * 37)];
            let device = device(kernel.arch, threads, &[order]);
            kernel.run_on(&device, 37, &mut buffers).unwrap();
            buffers[1].words()
        };
        let want = result(1, ThreadOrder::Ascending);
        for order in [
            ThreadOrder::Ascending,
            ThreadOrder::Descending,
            ThreadOrder::Random(5),
        ] {
            assert!(result(3, order) == want, "{gpu}, {order:?}");
        }
    }
}

/// Finds a result that no barrier orders and no race shows: the value that an
/// atomic step returns, made here by a function that is not watched.
#[test]
fn a_result_that_depends_on_the_order_is_found() {
    let body = "PLAIN i32 take(i32 *next) { return (*next)++; }\n\
        KERNEL(64) k(i32 *y)\n{\n    __shared__ i32 next;\n\
        \x20   if (thread_index() == 0)\n        next = 0;\n    block_sync();\n\
        \x20   y[block_x() * 64 + thread_index()] = take(&next);\n}";
    let kernel = Kernel::new("gfx942", 64, vec![out("y")], body);
    let orders = [ThreadOrder::Ascending, ThreadOrder::Descending];
    let error = kernel
        .run_on(&device(kernel.arch, 2, &orders), 3, &mut [Data::room(192)])
        .unwrap_err();
    assert_eq!(
        error,
        "launch of kernel `k` failed: block (0, 0): the result depends on the order of threads: \
         `y`[0] differs between Ascending and Descending"
    );
    let one = device(kernel.arch, 2, &orders[..1]);
    kernel.run_on(&one, 3, &mut [Data::room(192)]).unwrap();
}

/// Checks that a failed launch leaves device and module usable, and that a
/// repeated launch starts from the bytes before it.
#[test]
fn a_device_survives_faults_and_repeats() {
    let body = "KERNEL(64) k(const i32 *x, i32 *y)\n{\n    const i32 t = thread_index();\n\
        \x20   y[t] = y[t] + x[t];\n    if (x[0] == 7)\n        block_sync();\n    else if (t > 9 && x[1] == 9)\n        block_sync();\n}";
    let params = vec![
        Param::read("x", DType::I32, "[n]"),
        Param::tensor("y", DType::I32, Access::ReadWrite, "[n]"),
    ];
    let kernel = Kernel::new("gfx942", 64, params, body);
    let device = device(
        kernel.arch,
        2,
        &[ThreadOrder::Ascending, ThreadOrder::Random(3)],
    );
    let module = device
        .load(&kernel.compile(), &kernel.source.entries)
        .unwrap();
    for _ in 0..3 {
        let mut bad = [Data::ints(&[9; 64]), Data::ints(&[1; 64])];
        let error = launch(&device, &module, kernel.dims(1), &mut bad).unwrap_err();
        assert!(
            error.contains("deadlock: threads 0-9 have returned"),
            "{error}"
        );
        let mut good = [Data::ints(&[7; 64]), Data::ints(&[5; 64])];
        launch(&device, &module, kernel.dims(1), &mut good).unwrap();
        assert_eq!(good[1].words(), [12; 64], "added once, though run twice");
    }
    let counters = device.take_counters();
    assert_eq!(counters.len(), 1);
    assert_eq!((counters[0].launches, counters[0].blocks), (3, 3));
    assert_eq!(counters[0].instructions.sync, 3);
    assert_eq!(counters[0].global_stores.bytes, 3 * 64 * 4);
    assert!(device.take_counters().is_empty());
}

#[test]
fn reports_say_what_a_block_takes() {
    let body = "KERNEL(64) k(i32 *y)\n{\n    __shared__ f32 tile[100];\n    __shared__ i32 more[3];\n\
        \x20   tile[thread_index()] = 1;\n    if (thread_index() < 3) more[thread_index()] = 2;\n    block_sync();\n\
        \x20   y[thread_index()] = more[0] + (i32)tile[63 - thread_index()];\n}";
    let kernel = Kernel::new("gfx942", 64, vec![out("y")], body);
    let report = kernel.compile().report;
    assert_eq!(report.kernels[0].shared_bytes, Some(412));
    assert!(report.compile_ms > 0.0 && !report.compiler.is_empty());
    let compiler = compiler();
    let prints = ["sim:gfx942", "sim:gfx1100"].map(|t| compiler.fingerprint(t.parse().unwrap()));
    assert_eq!(prints[0], prints[1], "the text says for which GPU it is");
    assert!(
        prints[0].contains("-ffp-contract=off") && !prints[0].contains('/'),
        "{}",
        prints[0]
    );
    assert!(compiler.targets().contains(&kernel.source.target));
}

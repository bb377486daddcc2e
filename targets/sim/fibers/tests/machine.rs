//! What the machine does: barriers, collectives, blocks, memory.

mod common;

use common::*;
use moesaic_kernel::*;

fn out(name: &str) -> Param {
    Param::write(name, DType::I32, "[n]")
}

/// Each thread's answer to an expression, for two blocks of two waves.
fn answers(gpu: &str, expression: &str) -> Vec<u32> {
    let threads = 2 * arch(gpu).wave;
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

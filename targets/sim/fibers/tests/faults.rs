//! Every defect of a kernel is reported with block, thread, place and line.

mod common;

use common::*;
use moesaic_fibers::ThreadOrder;
use moesaic_kernel::*;
use moesaic_target::*;

fn int_out(name: &str) -> Param {
    Param::write(name, DType::I32, "[n]")
}

fn int_in(name: &str) -> Param {
    Param::read(name, DType::I32, "[n]")
}

/// Returns a kernel of 128 threads over `x`, which it reads, and `y`, which it
/// writes; 256 elements each.
fn kernel(body: &str) -> Kernel {
    let text = format!(
        "KERNEL(128) k(const i32 *x, i32 *y)\n{{\n    const i32 t = thread_index(); (void)x; (void)y; (void)t;\n{body}\n}}"
    );
    Kernel::new("gfx942", 128, vec![int_in("x"), int_out("y")], &text)
}

/// Checks the error of a body in one block or in two. `LINE n` stands for the
/// line of the n-th part.
fn fault(body: &str, expected: &str) {
    let kernel = kernel(body);
    let mut want = expected.to_string();
    for (i, marker) in ["/*0*/", "/*1*/"].iter().enumerate() {
        if body.contains(marker) {
            want = want.replace(&format!("LINE{i}"), &kernel.line(marker).to_string());
        }
    }
    let mut buffers = [Data::ints(&[1; 256]), Data::room(256)];
    let blocks = if expected.contains("(1, 0)") { 2 } else { 1 };
    // One core fixes which of two blocks comes first.
    let device = device(kernel.arch, 1, &[ThreadOrder::Ascending]);
    let result = kernel.run_on(&device, blocks, &mut buffers);
    let Err(error) = result else {
        panic!("nothing is said of\n{body}")
    };
    let want = format!("launch of kernel `k` failed: {want}");
    assert!(same(&error, &want), "{error}\nis not\n{want}");
}

#[test]
fn accesses_outside_of_tensors() {
    fault(
        "    if (block_x() == 1 && t == 77) /*0*/\n        y[256] = 1; /*1*/",
        "block (1, 0), thread 77 writes 4 bytes at `y`[256], 0 bytes beyond its end (line LINE1): \
         outside of every tensor of the launch and of shared memory",
    );
    fault(
        "    y[t] = x[t - 1]; /*0*/",
        "block (0, 0), thread 0 reads 4 bytes at `x`[-1], 4 bytes before its start (line LINE0): \
         outside of every tensor of the launch and of shared memory",
    );
    fault(
        "    const i64 far = (i64)t << 32;\n    y[t] = x[far]; /*0*/",
        "block (0, 0), thread 1 reads 4 bytes at * (line LINE0): \
         outside of every tensor of the launch and of shared memory",
    );
}

/// Compares, where `*` stands for any text.
fn same(got: &str, want: &str) -> bool {
    let mut rest = Some(got);
    for part in want.split('*') {
        rest = rest.and_then(|text| Some(&text[text.find(part)? + part.len()..]));
    }
    rest.is_some_and(|rest| rest.is_empty() || want.ends_with('*'))
}

#[test]
fn what_may_not_be_touched_so() {
    fault(
        "    y[t] = y[t + 128]; /*0*/",
        "block (0, 0), thread 0 reads 4 bytes at `y`[128] (line LINE0): which nobody has written",
    );
    fault(
        "    const_cast<i32 *>(x)[t] = 1; /*0*/",
        "block (0, 0), thread 0 writes 4 bytes at `x`[0] (line LINE0): \
         a parameter that the kernel declares to only read",
    );
    fault(
        "    __shared__ i32 mine[128];\n    y[t] = mine[t]; /*0*/",
        "block (0, 0), thread 0 reads 4 bytes at shared `mine`, byte 0 (line LINE0): which nobody has written",
    );
    fault(
        "    y[t] = load<4>(x + t).at[3]; /*0*/",
        // Some compilers see it themselves, the others write what the check
        // prints.
        "block (0, 0), thread 1 * not *",
    );
    fault(
        "    __shared__ i32 *where;\n    i32 own = t;\n    if (t == 3) where = &own;\n    block_sync();\n    y[t] = *where; /*0*/",
        "block (0, 0), thread * reads 4 bytes of a local variable of thread 3 (line LINE0)",
    );
}

#[test]
fn races_name_both_sides() {
    fault(
        "    __shared__ i32 tile[128];\n    tile[t] = t; /*0*/\n    y[t] = t < 64 ? 0 : tile[t - 64]; /*1*/",
        "block (0, 0), thread 64 reads shared `tile`, byte 0 (line LINE1), which thread 0 wrote (line LINE0) \
         with no barrier between: the result depends on the order of threads",
    );
    fault(
        "    __shared__ i32 tile[128];\n    tile[t] = t;\n    block_sync();\n\
         \x20   const i32 own = tile[127 - t]; /*0*/\n    tile[t] = 0; /*1*/\n    y[t] = own;",
        "block (0, 0), thread 0 reads shared `tile`, byte 508 (line LINE0), which thread 127 wrote (line LINE1)*",
    );
    fault(
        "    __shared__ i32 count[2];\n    if (t < 2) count[t] = 0; /*0*/\n    warp_sync();\n    shared_add(&count[t / 64], 1);",
        "block (0, 0), thread * adds to shared `count`, byte 4*which thread 1 wrote (line LINE0)*",
    );
    fault(
        "    y[t] = 1; /*0*/\n    warp_sync();\n    if (t == 100)\n        y[3] = 2; /*1*/",
        "block (0, 0), thread 100 writes `y`[3] (line LINE1), which thread 3 wrote with no barrier*",
    );
    fault(
        "    y[block_x() == 1 ? t : 127 - t] = t; /*0*/",
        "block (1, 0), thread 0 writes `y`[0] (line LINE0), which thread 127 of block (0, 0) wrote with no barrier*",
    );
}

/// Orders that waves and atomics give are enough.
#[test]
fn order_is_enough() {
    let kernel = kernel(
        "    __shared__ i32 tile[128], count[2];\n    if (t % 64 == 0) count[t / 64] = 0;\n    tile[t] = t;\n\
         \x20   warp_sync();\n    shared_add(&count[t / 64], 1);\n    const i32 other = tile[t ^ 63];\n    warp_sync();\n\
         \x20   tile[t] = other + count[t / 64];\n    block_sync();\n    y[block_x() * 128 + t] = tile[127 - t];",
    );
    let mut buffers = [Data::ints(&[1; 256]), Data::room(256)];
    kernel.run(2, &mut buffers).unwrap();
    let want = (0..256u32).map(|i| ((127 - i % 128) ^ 63) + 64);
    assert!(buffers[1].words().into_iter().eq(want));
}

#[test]
fn lanes_that_do_not_meet() {
    fault(
        "    if (t < 40) /*0*/\n        warp_sync(); /*1*/\n    else\n        y[t] = (i32)ballot(true);",
        "block (0, 0), thread 40 is at ballot (line *) while thread 0 of its wave waits at warp_sync (line LINE1): \
         all lanes of a wave take part in a collective",
    );
    fault(
        "    if (t % 64 < 3)\n        return;\n    warp_sync(); /*0*/\n    block_sync();",
        "block (0, 0): deadlock: threads 0-2 have returned, threads 3-63 wait at warp_sync (line LINE0), \
         threads 64-66 have returned, threads 67-127 wait at warp_sync (line LINE0)",
    );
    fault(
        "    if (t >= 64)\n        block_sync(); /*0*/\n    y[t] = 1;",
        "block (0, 0): deadlock: threads 0-63 have returned, threads 64-127 wait at block_sync (line LINE0)",
    );
    fault(
        "    y[t] = (i32)match_any<3>((u32)t); /*0*/",
        "block (0, 0), thread 8 calls match_any<3> with 8, which has more than 3 bits (line LINE0)",
    );
}

#[test]
fn what_the_compiler_checks() {
    fault(
        "    i32 local[4] = {1, 2, 3, 4};\n    y[t] = local[x[t] * t]; /*0*/",
        "block (0, 0), thread 4 uses index 4 beyond the end of an array (line LINE0, column *)",
    );
    fault(
        "    y[t] = 100 / (x[t] * (5 - t)); /*0*/",
        "block (0, 0), thread 5 divides by zero (line LINE0, column *)",
    );
}

#[test]
fn launches_that_cannot_be() {
    let kernel = kernel("    y[block_x() * 128 + t] = t;");
    let device = device(kernel.arch, 1, &[ThreadOrder::Ascending]);
    let fails = |threads: u32, shared_bytes: u32, expected: &str| {
        let module = device
            .load(&kernel.compile(), &kernel.source.entries)
            .unwrap();
        let dims = LaunchDims {
            threads,
            shared_bytes,
            ..kernel.dims(2)
        };
        let mut buffers = [Data::ints(&[1; 256]), Data::room(256)];
        let error = launch(&device, &module, dims, &mut buffers).unwrap_err();
        assert_eq!(error, format!("launch of kernel `k` failed: {expected}"));
    };
    fails(
        100,
        0,
        "a block of 100 threads is not 1 to 16 whole waves of 64",
    );
    fails(
        1088,
        0,
        "a block of 1088 threads is not 1 to 16 whole waves of 64",
    );
    fails(
        128,
        65552,
        "a block takes 65552 bytes of shared memory, gfx942 has 65536",
    );
    let other = common::device(arch("gfx1100"), 1, &[ThreadOrder::Ascending]);
    let error = other
        .load(&kernel.compile(), &kernel.source.entries)
        .err()
        .unwrap();
    assert_eq!(
        error.to_string(),
        "cannot load kernel `k`: it was written for waves of 64 lanes, those of gfx1100 have 32"
    );
}

#[test]
fn pointers_must_be_of_the_device() {
    let kernel = kernel("    y[block_x() * 128 + t] = t;");
    let device = device(kernel.arch, 1, &[ThreadOrder::Ascending]);
    let module = device
        .load(&kernel.compile(), &kernel.source.entries)
        .unwrap();
    let buffer = device.alloc(1024).unwrap();
    let args = [Arg::Ptr(buffer.ptr()), Arg::Ptr(Ptr(0x1000))];
    // SAFETY: the device looks up every address before it is used.
    let error = unsafe { module.launch("k", kernel.dims(2), &args) }.unwrap_err();
    assert_eq!(
        error.to_string(),
        "launch of kernel `k` failed: `y` points to 0x1000, where no buffer of this device is"
    );
}

#[test]
fn text_that_does_not_compile_is_rejected_with_its_line() {
    let kernel = kernel("    y[t] = missing; /*0*/");
    let error = compiler()
        .compile(&kernel.source, &CompileOptions::default())
        .unwrap_err();
    let CompileError::Rejected { log, .. } = &error else {
        panic!("{error}")
    };
    let place = format!("kernel.cpp:{}:", kernel.line("/*0*/"));
    assert!(log.contains(&place) && log.contains("missing"), "{log}");
    let mut source = kernel.source;
    source.target = "rocm:gfx942".parse().unwrap();
    let error = compiler()
        .compile(&source, &CompileOptions::default())
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("cannot compile for `rocm:gfx942`"),
        "{error}"
    );
}

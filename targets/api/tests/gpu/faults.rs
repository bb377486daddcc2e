//! Kernels that fail after their launch, and drivers that fail anywhere.

use super::*;
use moesaic_target::{DeviceCopy, RowCopy};

pub const CASES: &[Case] = &[
    Case::new("a_late_fault", a_late_fault).leaking(),
    Case::new("one_of_several", one_of_several).leaking(),
    Case::new("nothing_launched", nothing_launched).leaking(),
    Case::new("a_fault_in_a_graph", a_fault_in_a_graph).leaking(),
    Case::new("a_fault_at_a_launch", a_fault_at_a_launch).leaking(),
    Case::new("a_fault_of_the_hardware", a_fault_of_the_hardware).leaking(),
];

/// Functions that are made to fail, one at a time, during a device's whole life.
pub const EACH: [&str; 36] = [
    "memory_info",
    "default_pool",
    "pool_set",
    "pool_access",
    "can_access_peer",
    "stream_create",
    "stream_destroy",
    "stream_synchronize",
    "stream_wait",
    "alloc_async",
    "free_async",
    "alloc",
    "free",
    "host_alloc",
    "host_free",
    "upload",
    "download",
    "copy",
    "copy_rows",
    "module_load",
    "module_unload",
    "module_function",
    "launch",
    "occupancy",
    "event_create",
    "event_record",
    "event_query",
    "event_synchronize",
    "event_elapsed",
    "event_destroy",
    "capture_begin",
    "capture_end",
    "graph_instantiate",
    "graph_launch",
    "graph_destroy",
    "exec_destroy",
];

/// Does everything that a device can do, once. A failure must be an error and never a crash.
pub fn whole_life(harness: &Harness) {
    match life(harness) {
        Ok(()) => println!("no error"),
        Err(error) => {
            assert!(error.to_string().contains("some words"), "{error}");
        }
    }
}

fn life(harness: &Harness) -> Result<(), DeviceError> {
    let device = (harness.open)(0)?;
    let gpu = device.streams()?;
    let other = gpu.fork()?;
    gpu.reaches(1)?;
    gpu.admit(1)?;
    let module = device.load(&harness.artifact(), &[entry()])?;
    let on_other = other.adopt(&*module)?;
    gpu.occupancy(&*module, "scale", 256, 0)?;
    let (a, b) = (device.alloc(40)?, device.alloc(40)?);
    let mut host = gpu.pinned(40)?;
    device.upload(&host, &a, 0)?;
    let scale = Scale {
        from: &a,
        to: &b,
        factor: 2.0,
        count: 10,
    };
    let start = gpu.record()?;
    scale.launch(&*module, [1, 1])?;
    let end = gpu.record()?;
    other.wait(&*end)?;
    scale.launch(&*on_other, [1, 1])?;
    other.synchronize()?;
    end.passed()?;
    end.elapsed_ms(&*start)?;
    gpu.begin_capture("life")?;
    scale.launch(&*module, [1, 1])?;
    let copy = DeviceCopy {
        from: &a,
        from_offset: 0,
        to: &b,
        to_offset: 0,
        bytes: 40,
    };
    gpu.copy(&copy)?;
    let rows = RowCopy {
        from: &a,
        from_offset: 0,
        from_stride: 20,
        to: &b,
        to_offset: 0,
        to_stride: 20,
        rows: 2,
        row_bytes: 20,
    };
    device.copy_rows(&rows)?;
    let graph = gpu.end_capture()?;
    for _ in 0..2 {
        // SAFETY: both buffers live.
        unsafe { graph.launch() }?;
    }
    device.download(&b, 0, &mut host)
}

fn launch(module: &dyn Module, grid: [u64; 2]) {
    // SAFETY: it touches nothing.
    unsafe { module.launch("scale", dims(grid), &nothing()) }.unwrap();
}

fn shape(x: u32) -> String {
    format!("grid {x} x 1, 256 threads, 0 bytes of dynamic shared memory")
}

fn a_late_fault(harness: &Harness) {
    let device = harness.open();
    let module = harness.load(&*device);
    let buffer = device.alloc(64).unwrap();
    launch(&*module, [7, 1]);
    device.synchronize().unwrap();
    launch(&*module, [9, 1]);
    fail(harness, "stream_synchronize", 700);
    let first = format!(
        "launch of kernel `scale` failed: {}: some words; it came to light at a later \
         synchronize; {}",
        harness.words.illegal_address,
        shape(9)
    );
    check_error(device.synchronize(), &first);
    every_later_call_says_so(harness, &*device, &buffer, &first);
    // SAFETY: it is refused.
    check_part(
        unsafe { module.launch("scale", dims([1, 1]), &nothing()) },
        "launch of kernel `scale` is not possible: an earlier failure has made the GPU unusable",
    );
}

fn every_later_call_says_so(harness: &Harness, device: &dyn Device, buffer: &Buffer, cause: &str) {
    let gpu = streams(device);
    let calls = log().len();
    let lost = |result: Result<(), DeviceError>, operation: &str| {
        check_error(
            result,
            &format!(
                "{operation} is not possible: an earlier failure has made the GPU unusable for \
                 this process\nthe failure: {cause}\nrestart the process"
            ),
        );
    };
    lost(device.synchronize(), "synchronize");
    lost(device.alloc(3).map(drop), "allocation of 3 bytes");
    lost(device.upload(&[1], buffer, 0), "upload");
    lost(device.download(buffer, 0, &mut [0]), "download");
    lost(
        device.load(&harness.artifact(), &[entry()]).map(drop),
        "load of kernel `scale`",
    );
    lost(gpu.record().map(drop), "a new event");
    lost(gpu.fork().map(drop), "a new stream");
    lost(gpu.begin_capture("g"), "the beginning of graph `g`");
    assert_eq!(log().len(), calls, "nothing reached the driver");
}

fn one_of_several(harness: &Harness) {
    let device = harness.open();
    let module = harness.load(&*device);
    let other = streams(&*device).fork().unwrap();
    let on_other = other.adopt(&*module).unwrap();
    launch(&*module, [1, 1]);
    launch(&*on_other, [2, 1]);
    device.synchronize().unwrap();
    launch(&*module, [3, 1]);
    launch(&*module, [4, 1]);
    launch(&*module, [3, 1]);
    fail(harness, "download", 719);
    let buffer = device.alloc(4).unwrap();
    let mut bytes = [0; 4];
    let error = device.download(&buffer, 0, &mut bytes);
    let error = error.unwrap_err().to_string();
    // Stream by stream, because no two streams share a journal.
    let expected = format!(
        "; it came to light at a later download; one of: `scale` ({}), `scale` ({}), `scale` \
         ({}); set {}=1 to be told which",
        shape(3),
        shape(4),
        shape(2),
        harness.words.blocking
    );
    assert!(error.starts_with("a launched kernel failed: "), "{error}");
    assert!(error.ends_with(&expected), "{error}\n{expected}");
}

fn nothing_launched(harness: &Harness) {
    let device = harness.open();
    fail(harness, "stream_synchronize", 700);
    check_part(
        device.synchronize(),
        "nothing was launched here since the last synchronise: it is of another user of the GPU",
    );
}

fn a_fault_in_a_graph(harness: &Harness) {
    let device = harness.open();
    let module = harness.load(&*device);
    let gpu = streams(&*device);
    gpu.begin_capture("decode").unwrap();
    launch(&*module, [1, 1]);
    launch(&*module, [2, 1]);
    let graph = gpu.end_capture().unwrap();
    // SAFETY: its kernels touch nothing.
    unsafe { graph.launch() }.unwrap();
    fail(harness, "stream_synchronize", 700);
    let expected = format!(
        "one of: graph `decode` with `scale` ({}), `scale` ({}); set",
        shape(1),
        shape(2)
    );
    check_part(device.synchronize(), &expected);
}

fn a_fault_at_a_launch(harness: &Harness) {
    let device = harness.open();
    let module = harness.load(&*device);
    launch(&*module, [5, 1]);
    fail(harness, "launch", 700);
    // SAFETY: it is refused.
    let error = unsafe { module.launch("scale", dims([6, 1]), &nothing()) };
    let expected = format!("it came to light at a later launch; {}", shape(5));
    check_part(error, &expected);
}

/// No kernel is blamed for it.
fn a_fault_of_the_hardware(harness: &Harness) {
    let device = harness.open();
    let module = harness.load(&*device);
    let buffer = device.alloc(4).unwrap();
    launch(&*module, [1, 1]);
    fail(harness, "stream_synchronize", 220);
    let error = device.synchronize().unwrap_err().to_string();
    assert!(error.starts_with("synchronize failed: "), "{error}");
    assert!(
        error.ends_with(": some words; the GPU is lost to this process"),
        "{error}"
    );
    every_later_call_says_so(harness, &*device, &buffer, &error);
}

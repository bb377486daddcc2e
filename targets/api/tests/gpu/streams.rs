//! Several streams, events, and modules that run on several streams.

use super::*;
use moesaic_target::Event;

pub const CASES: &[Case] = &[
    Case::new("two_streams", two_streams),
    Case::new("time_between_events", time_between_events),
    Case::new(
        "modules_wait_for_every_stream",
        modules_wait_for_every_stream,
    ),
    Case::new("foreign_things", foreign_things),
    Case::new("on_a_handle", on_a_handle),
];

fn two_streams(harness: &Harness) {
    let device = harness.open();
    let module = harness.load(&*device);
    let (a, b) = (device.alloc(40).unwrap(), device.alloc(40).unwrap());
    let values: Vec<f32> = (0..10).map(|i| i as f32).collect();
    device.upload(&bytes_of(&values), &a, 0).unwrap();
    let start = log().len();

    let other = streams(&*device).fork().unwrap();
    let on_other = other.adopt(&*module).unwrap();
    let scale = |from, to, factor| Scale {
        from,
        to,
        factor,
        count: 10,
    };
    scale(&a, &b, 2.0).launch(&*module, [1, 1]).unwrap();
    let done = streams(&*device).record().unwrap();
    other.wait(&*done).unwrap();
    scale(&b, &a, 4.0).launch(&*on_other, [1, 1]).unwrap();
    let back = other.record().unwrap();
    streams(&*device).wait(&*back).unwrap();
    let mut bytes = [0; 40];
    device.download(&a, 0, &mut bytes).unwrap();
    let expected: Vec<f32> = values
        .iter()
        .map(|value| (value * 2.0 + 0.25) * 4.0 + 0.25)
        .collect();
    assert_eq!(floats_of(&bytes), expected);
    let expected = [
        "create s2 flags 1",
        "launch scale grid 1 1 1 block 256 1 1 shared 0 on s1 params 2 a1+0 a2+0 10 0.25",
        "create e2 flags 0",
        "record e2 on s1",
        "s2 waits for e2 flags 0",
        "launch scale grid 1 1 1 block 256 1 1 shared 0 on s2 params 4 a2+0 a1+0 10 0.25",
        "create e3 flags 0",
        "record e3 on s2",
        "s1 waits for e3 flags 0",
        "download 40 from a1+0 on s1",
        "synchronize s1",
    ];
    assert_eq!(log()[start..], expected);
}

fn time_between_events(harness: &Harness) {
    let device = harness.open();
    let module = harness.load(&*device);
    let buffer = device.alloc(4).unwrap();
    let start = streams(&*device).record().unwrap();
    for _ in 0..6 {
        let scale = Scale {
            from: &buffer,
            to: &buffer,
            factor: 1.0,
            count: 1,
        };
        scale.launch(&*module, [1, 1]).unwrap();
    }
    let end = streams(&*device).record().unwrap();
    assert!(!end.passed().unwrap(), "nobody has waited for it");
    assert_eq!(end.elapsed_ms(&*start).unwrap(), 1.5);
    assert!(end.passed().unwrap() && start.passed().unwrap());
    assert_eq!(start.elapsed_ms(&*end).unwrap(), -1.5);
    assert!(log().contains(&"elapsed e1 to e2".to_string()));
}

/// A module may run on a stream whose device object is long gone.
fn modules_wait_for_every_stream(harness: &Harness) {
    let device = harness.open();
    let module = harness.load(&*device);
    let other = streams(&*device).fork().unwrap();
    let on_other = other.adopt(&*module).unwrap();
    // SAFETY: it touches nothing.
    unsafe { on_other.launch("scale", dims([1, 1]), &nothing()) }.unwrap();
    drop((other, on_other));
    let start = log().len();
    drop(module);
    let expected = [
        "synchronize s1",
        "synchronize s2",
        "unload m1",
        "destroy s2",
    ];
    assert_eq!(log()[start..], expected);
}

struct OtherEvent;

impl Event for OtherEvent {
    fn synchronize(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn passed(&self) -> Result<bool, DeviceError> {
        Ok(true)
    }

    fn elapsed_ms(&self, _: &dyn Event) -> Result<f32, DeviceError> {
        Ok(0.0)
    }
}

struct OtherModule;

impl Module for OtherModule {
    fn function(&self, _: &str) -> Result<FunctionId, DeviceError> {
        Ok(FunctionId(0))
    }

    unsafe fn run(&self, _: FunctionId, _: LaunchDims, _: &[Arg]) -> Result<(), DeviceError> {
        Ok(())
    }
}

fn foreign_things(harness: &Harness) {
    let device = harness.open();
    let gpu = streams(&*device);
    let other = gpu.fork().unwrap().native_stream().unwrap();
    assert_ne!(gpu.native_stream().unwrap(), other);
    let text = |what: &str| format!("`{}` does not support {what}", harness.backend);
    check_error(
        gpu.wait(&OtherEvent),
        &text("waiting for an event of another kind of device"),
    );
    let own = gpu.record().unwrap();
    check_error(
        own.elapsed_ms(&OtherEvent),
        &text("the time from an event of another kind of device"),
    );
    check_error(
        gpu.adopt(&OtherModule),
        &text("launching a module of another device"),
    );
    let second = (harness.open)(1).unwrap();
    let module = harness.load(&*second);
    check_error(
        gpu.adopt(&*module),
        &text("launching a module of another device"),
    );
    check_error(
        gpu.occupancy(&*module, "scale", 32, 0),
        &text("the occupancy of a module of another device"),
    );
    // A stream may wait for an event of another GPU.
    gpu.wait(&*streams(&*second).record().unwrap()).unwrap();
}

fn on_a_handle(harness: &Harness) {
    let owner = harness.open();
    let handle = streams(&*owner).native_stream().unwrap();
    let device = (harness.on_handle)(0, handle).unwrap();
    let module = harness.load(&*device);
    // SAFETY: it touches nothing.
    unsafe { module.launch("scale", dims([1, 1]), &nothing()) }.unwrap();
    device.synchronize().unwrap();
    drop(module);
    drop(device);
    let destroyed = |line: &String| line.contains("destroy s1");
    assert!(!log().iter().any(destroyed), "the stream is its owner's");
    drop(owner);
    let log = log();
    let launched = |line: &String| line.starts_with("launch scale") && line.contains("on s1");
    assert!(log.iter().any(launched), "{log:?}");
    assert!(log.iter().any(destroyed), "{log:?}");
    let none = (harness.on_handle)(9, std::ptr::null_mut());
    check_part(none, "GPU 9 was asked for");
}

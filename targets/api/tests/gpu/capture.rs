//! Graphs: capture, operations refused during it, and resources that a graph keeps.

use super::*;
use moesaic_target::DeviceCopy;

pub const CASES: &[Case] = &[
    Case::new("a_graph_replays", a_graph_replays),
    Case::new("refused_while_capturing", refused_while_capturing),
    Case::new("a_capture_spreads", a_capture_spreads),
    Case::new("a_capture_left_open", a_capture_left_open),
    Case::new("events_of_a_graph", events_of_a_graph),
    Case::new("a_graph_keeps_what_it_uses", a_graph_keeps_what_it_uses),
    Case::new(
        "a_graph_keeps_what_it_is_given",
        a_graph_keeps_what_it_is_given,
    ),
    Case::new("graphs_dropped_in_a_capture", graphs_dropped_in_a_capture),
    Case::new("dropped_in_a_broken_capture", dropped_in_a_broken_capture).failing(
        "capture_end",
        901,
        1,
    ),
    Case::new("a_module_of_other_streams", a_module_of_other_streams),
    Case::new("an_abandoned_capture", an_abandoned_capture),
    Case::new("a_refused_graph", a_refused_graph).failing("graph_instantiate", 1, 0),
    Case::new("a_broken_capture", a_broken_capture).failing("capture_end", 901, 0),
];

struct Bench {
    device: Arc<dyn Device>,
    module: Arc<dyn Module>,
    a: Buffer,
    b: Buffer,
}

impl Bench {
    /// Makes two buffers of 10 floats, the first one with 0 to 9.
    fn new(harness: &Harness) -> Bench {
        let device = harness.open();
        let module = harness.load(&*device);
        let (a, b) = (device.alloc(40).unwrap(), device.alloc(40).unwrap());
        let values: Vec<f32> = (0..10).map(|i| i as f32).collect();
        device.upload(&bytes_of(&values), &a, 0).unwrap();
        Bench {
            device,
            module,
            a,
            b,
        }
    }

    fn gpu(&self) -> &dyn StreamDevice {
        streams(&*self.device)
    }

    fn scale(&self, from: &Buffer, to: &Buffer, module: &dyn Module) {
        let scale = Scale {
            from,
            to,
            factor: 2.0,
            count: 10,
        };
        scale.launch(module, [1, 1]).unwrap();
    }

    fn back(&self) -> Vec<f32> {
        let mut bytes = [0; 40];
        self.device.download(&self.a, 0, &mut bytes).unwrap();
        floats_of(&bytes)
    }
}

fn a_graph_replays(harness: &Harness) {
    let bench = Bench::new(harness);
    let gpu = bench.gpu();
    let start = log().len();
    gpu.begin_capture("double").unwrap();
    assert_eq!(bench.device.capturing().as_deref(), Some("double"));
    bench.scale(&bench.a, &bench.b, &*bench.module);
    let copy = DeviceCopy {
        from: &bench.b,
        from_offset: 0,
        to: &bench.a,
        to_offset: 0,
        bytes: 40,
    };
    gpu.copy(&copy).unwrap();
    let graph = gpu.end_capture().unwrap();
    assert_eq!(bench.device.capturing(), None);
    assert_eq!(
        (graph.name(), graph.kernels()),
        ("double", vec!["scale".to_string()])
    );
    let expected: [&str; 6] = [
        "begin capture on s1 mode 2",
        "launch scale grid 1 1 1 block 256 1 1 shared 0 on s1 params 2 a1+0 a2+0 10 0.25",
        "copy 40 from a2+0 to a1+0 on s1",
        "end capture on s1",
        "instantiate g1 flags 0 with 2 nodes",
        "destroy g1",
    ];
    assert_eq!(log()[start..], expected);

    let first: Vec<f32> = (0..10).map(|i| i as f32).collect();
    assert_eq!(bench.back(), first, "nothing has run yet");
    for _ in 0..3 {
        // SAFETY: both buffers live.
        unsafe { graph.launch() }.unwrap();
    }
    let tripled = |value: &f32| (0..3).fold(*value, |value, _| value * 2.0 + 0.25);
    assert_eq!(bench.back(), first.iter().map(tripled).collect::<Vec<_>>());
    let start = log().len();
    drop(graph);
    assert_eq!(log()[start..], ["synchronize s1", "destroy x1"]);
}

fn refused_while_capturing(harness: &Harness) {
    let bench = Bench::new(harness);
    let (device, gpu) = (&*bench.device, bench.gpu());
    let event = gpu.record().unwrap();
    gpu.begin_capture("decode").unwrap();
    let start = log().len();
    let refused = |result: Result<(), DeviceError>, attempted: &str| {
        check_error(
            result,
            &format!(
                "{attempted} is not possible while graph `decode` is being captured: do it \
                 before the capture, or after its end"
            ),
        );
    };
    refused(
        device.load(&harness.artifact(), &[entry()]).map(drop),
        "the load of kernel `scale`",
    );
    refused(device.alloc(5).map(drop), "an allocation of 5 bytes");
    refused(device.synchronize(), "synchronize");
    refused(
        device.upload(&[1; 4], &bench.a, 0),
        "a copy of 4 bytes from the host",
    );
    refused(
        device.download(&bench.a, 0, &mut [0; 8]),
        "a copy of 8 bytes to the host",
    );
    refused(
        gpu.pinned(7).map(drop),
        "an allocation of 7 bytes of pinned memory",
    );
    refused(gpu.fork().map(drop), "a new stream");
    refused(gpu.begin_capture("other"), "the beginning of graph `other`");
    refused(gpu.wait(&*event), "a wait for an event from outside of it");
    refused(event.synchronize(), "a wait on the host for an event");
    assert_eq!(log().len(), start, "nothing reached the driver");
    bench.scale(&bench.a, &bench.b, &*bench.module);
    let graph = gpu.end_capture().unwrap();
    assert_eq!(graph.kernels(), ["scale"], "the capture is unharmed");
    device.synchronize().unwrap();
    check_error(
        gpu.end_capture().map(drop),
        "the end of a capture failed: no graph is being captured on this stream",
    );
}

fn a_capture_spreads(harness: &Harness) {
    let bench = Bench::new(harness);
    let gpu = bench.gpu();
    let other = gpu.fork().unwrap();
    let on_other = other.adopt(&*bench.module).unwrap();
    gpu.begin_capture("two").unwrap();
    bench.scale(&bench.a, &bench.b, &*bench.module);
    let fork = gpu.record().unwrap();
    other.wait(&*fork).unwrap();
    assert_eq!(other.capturing().as_deref(), Some("two"));
    check_part(other.alloc(1), "while graph `two` is being captured");
    check_error(
        other.end_capture().map(drop),
        "the capture of graph `two` failed: it was begun on another stream and must end there",
    );
    bench.scale(&bench.b, &bench.a, &*on_other);
    let join = other.record().unwrap();
    gpu.wait(&*join).unwrap();
    let graph = gpu.end_capture().unwrap();
    assert_eq!(other.capturing(), None);
    assert_eq!(graph.kernels(), ["scale", "scale"]);
    drop((other, on_other));
    // SAFETY: both buffers live.
    unsafe { graph.launch() }.unwrap();
    assert_eq!(bench.back()[3], (3.0 * 2.0 + 0.25) * 2.0 + 0.25);
}

fn a_capture_left_open(harness: &Harness) {
    let bench = Bench::new(harness);
    let gpu = bench.gpu();
    let other = gpu.fork().unwrap();
    let on_other = other.adopt(&*bench.module).unwrap();
    gpu.begin_capture("two").unwrap();
    let fork = gpu.record().unwrap();
    other.wait(&*fork).unwrap();
    bench.scale(&bench.a, &bench.b, &*on_other);
    check_part(
        gpu.end_capture().map(drop),
        "the capture of graph `two` failed: ",
    );
    assert_eq!((gpu.capturing(), other.capturing()), (None, None));
    drop(other.alloc(4).unwrap());
}

fn events_of_a_graph(harness: &Harness) {
    let bench = Bench::new(harness);
    let gpu = bench.gpu();
    let other = gpu.fork().unwrap();
    gpu.begin_capture("timed").unwrap();
    let inside = gpu.record().unwrap();
    other.begin_capture("second").unwrap();
    check_part(
        other.wait(&*inside),
        "a wait for an event of graph `timed` is not possible while graph `second`",
    );
    let _second = other.end_capture().unwrap();
    let _graph = gpu.end_capture().unwrap();
    let text = "the event is a part of graph `timed` and never comes to pass by itself; record \
                events around the graph's launch";
    check_part(inside.synchronize(), text);
    check_part(other.wait(&*inside), text);
    let outside = gpu.record().unwrap();
    check_part(outside.elapsed_ms(&*inside).map(drop), text);
    check_part(inside.elapsed_ms(&*outside).map(drop), text);
}

fn a_graph_keeps_what_it_uses(harness: &Harness) {
    let mut bench = Bench::new(harness);
    let workspace = bench.device.alloc(40).unwrap();
    let unused = harness.load(&*bench.device);
    bench.gpu().begin_capture("kept").unwrap();
    bench.scale(&bench.a, &workspace, &*bench.module);
    bench.scale(&workspace, &bench.a, &*bench.module);
    let start = log().len();
    drop((workspace, unused));
    bench.module = Arc::new(Gone);
    assert_eq!(log().len(), start, "nothing is freed into the graph");
    let graph = bench.gpu().end_capture().unwrap();
    // SAFETY: `a` lives, and the graph keeps the workspace.
    unsafe { graph.launch() }.unwrap();
    assert_eq!(bench.back()[2], (2.0 * 2.0 + 0.25) * 2.0 + 0.25);
    let start = log().len();
    drop(graph);
    let expected = [
        "synchronize s1",
        "destroy x1",
        "synchronize s1",
        "unload m1",
        "unload m2",
        "free a3 on s1",
    ];
    assert_eq!(log()[start..], expected);
}

/// The owner of memory drops it after the capture, as a growing layer does.
fn a_graph_keeps_what_it_is_given(harness: &Harness) {
    let bench = Bench::new(harness);
    let workspace = Arc::new(bench.device.alloc(40).unwrap());
    bench.device.keep(workspace.clone());
    assert_eq!(Arc::strong_count(&workspace), 1, "there is no graph yet");
    bench.gpu().begin_capture("kept").unwrap();
    bench.scale(&bench.a, &workspace, &*bench.module);
    bench.scale(&workspace, &bench.a, &*bench.module);
    bench.device.keep(workspace.clone());
    bench.device.keep(workspace.clone());
    let graph = bench.gpu().end_capture().unwrap();
    let start = log().len();
    drop(workspace);
    assert_eq!(log().len(), start, "the graph uses it");
    // SAFETY: `a` lives, and the graph keeps the workspace.
    unsafe { graph.launch() }.unwrap();
    assert_eq!(bench.back()[2], (2.0 * 2.0 + 0.25) * 2.0 + 0.25);
    let start = log().len();
    drop(graph);
    let expected = ["synchronize s1", "destroy x1", "free a3 on s1"];
    assert_eq!(log()[start..], expected);
}

/// A stand-in for a module.
struct Gone;

impl Module for Gone {
    fn function(&self, _: &str) -> Result<FunctionId, DeviceError> {
        Ok(FunctionId(0))
    }

    unsafe fn run(&self, _: FunctionId, _: LaunchDims, _: &[Arg]) -> Result<(), DeviceError> {
        Ok(())
    }
}

fn graphs_dropped_in_a_capture(harness: &Harness) {
    let bench = Bench::new(harness);
    let workspace = bench.device.alloc(40).unwrap();
    bench.gpu().begin_capture("first").unwrap();
    bench.scale(&bench.a, &workspace, &*bench.module);
    drop(workspace);
    let first = bench.gpu().end_capture().unwrap();
    bench.gpu().begin_capture("second").unwrap();
    // SAFETY: it is refused.
    check_part(
        unsafe { first.launch() },
        "the launch of graph `first` is not possible while graph `second` is being captured",
    );
    let start = log().len();
    drop(first);
    assert_eq!(log().len(), start, "it may be running");
    let second = bench.gpu().end_capture().unwrap();
    let start = log().len();
    drop(second);
    let expected = [
        "synchronize s1",
        "destroy x1",
        "destroy x2",
        "free a3 on s1",
    ];
    assert_eq!(log()[start..], expected);
}

/// The module was never used on the stream that its graph runs on.
fn dropped_in_a_broken_capture(harness: &Harness) {
    let device = harness.open();
    let gpu = streams(&*device);
    let other = gpu.fork().unwrap();
    let module = harness.load(&*other);
    gpu.begin_capture("first").unwrap();
    other.wait(&*gpu.record().unwrap()).unwrap();
    // SAFETY: it touches nothing.
    unsafe { module.launch("scale", dims([1, 1]), &nothing()) }.unwrap();
    gpu.wait(&*other.record().unwrap()).unwrap();
    let first = gpu.end_capture().unwrap();
    // SAFETY: as above.
    unsafe { first.launch() }.unwrap();
    drop((module, other));
    gpu.begin_capture("second").unwrap();
    drop(first);
    let start = log().len();
    check_part(
        gpu.end_capture().map(drop),
        "the capture of graph `second` failed: ",
    );
    let expected = [
        "end capture on s1",
        "synchronize s1",
        "destroy x1",
        "synchronize s2",
        "unload m1",
    ];
    assert_eq!(log()[start..][..5], expected);
}

/// During a capture, a module is dropped that still runs on a stream outside of it, and on one that
/// joined it later.
fn a_module_of_other_streams(harness: &Harness) {
    let device = harness.open();
    let gpu = streams(&*device);
    let (outside, joined) = (gpu.fork().unwrap(), gpu.fork().unwrap());
    let module = harness.load(&*device);
    for stream in [&outside, &joined] {
        let module = stream.adopt(&*module).unwrap();
        // SAFETY: it touches nothing.
        unsafe { module.launch("scale", dims([1, 1]), &nothing()) }.unwrap();
    }
    gpu.begin_capture("graph").unwrap();
    joined.wait(&*gpu.record().unwrap()).unwrap();
    gpu.wait(&*joined.record().unwrap()).unwrap();
    drop(module);
    let graph = gpu.end_capture().unwrap();
    assert!(!log().contains(&"unload m1".to_string()));
    drop(graph);
    assert!(log().contains(&"unload m1".to_string()));
}

fn an_abandoned_capture(harness: &Harness) {
    let bench = Bench::new(harness);
    bench.gpu().begin_capture("never").unwrap();
    bench.scale(&bench.a, &bench.b, &*bench.module);
    let other = {
        let fork = bench.gpu().record().unwrap();
        let device = harness.open();
        drop(fork);
        device
    };
    drop(bench);
    drop(other);
    assert!(log().contains(&"end capture on s1".to_string()));
}

fn a_refused_graph(harness: &Harness) {
    let bench = Bench::new(harness);
    bench.gpu().begin_capture("layer").unwrap();
    bench.scale(&bench.a, &bench.b, &*bench.module);
    check_part(
        bench.gpu().end_capture().map(drop),
        "instantiation of graph `layer` failed: ",
    );
    bench.device.synchronize().unwrap();
}

fn a_broken_capture(harness: &Harness) {
    let bench = Bench::new(harness);
    bench.gpu().begin_capture("layer").unwrap();
    check_part(
        bench.gpu().end_capture().map(drop),
        "the capture of graph `layer` failed: ",
    );
    assert_eq!(bench.device.capturing(), None);
    bench.device.synchronize().unwrap();
}

//! Opening, memory, loading and launching, and their errors.

use super::*;
use moesaic_target::{DeviceCopy, RowCopy};

pub const CASES: &[Case] = &[
    Case::new("a_layer_runs", a_layer_runs),
    Case::new("peers", peers),
    Case::new("without_pools", without_pools).failing("default_pool", 801, 0),
    Case::new("pools_that_refuse", pools_that_refuse).failing("alloc_async", 801, 0),
    Case::new("no_driver", no_driver).on(Driver::Absent),
    Case::new("no_graphs", no_graphs).on(Driver::Lacks("graph_instantiate")),
    Case::new("no_gpu", no_gpu).failing("init", 100, 0),
    Case::new("wrong_gpu", wrong_gpu),
    Case::new("out_of_memory", out_of_memory).failing("alloc_async", 2, 0),
    Case::new("refused_binary", refused_binary).failing("module_load", 209, 0),
    Case::new("refused_launch", refused_launch).failing("launch", 701, 0),
    Case::new("bad_requests", bad_requests),
    Case::new("bad_entries", bad_entries),
    Case::new("facts", facts),
    Case::new("occupancy", occupancy),
    Case::new("small_uploads", small_uploads),
    Case::new("large_uploads", large_uploads),
    Case::new("uploads_without_pinned_memory", waited_for).failing("host_alloc", 2, 0),
    Case::new("uploads_without_events", waited_for).failing("event_create", 2, 0),
    Case::new("uploads_of_many_threads", uploads_of_many_threads),
    Case::new("uploads_left_behind", uploads_left_behind),
    Case::new("an_image_may_go", an_image_may_go),
    Case::new("pinned_and_copied", pinned_and_copied),
    Case::new("rows_copied", rows_copied),
    Case::new("buffers_outlive_the_device", buffers_outlive_the_device),
];

/// Scales 300 floats, with an input offset so that a wrong offset shows.
fn scale(harness: &Harness, device: &dyn Device) -> Result<(), DeviceError> {
    let values = (0..300).map(|i| i as f32 * 0.5 - 3.0).collect::<Vec<_>>();
    let module = device.load(&harness.artifact(), &[entry()])?;
    let input = device.alloc(1204)?;
    let output = device.alloc(1200)?;
    device.upload(&bytes_of(&values), &input, 4)?;
    let args = [
        Arg::F32(-2.0),
        Arg::Ptr(Ptr(input.ptr().0 + 4)),
        Arg::Ptr(output.ptr()),
        Arg::I64(300),
        Arg::F32(0.25),
    ];
    // SAFETY: the arguments are those of `entry`, and both buffers hold 300 floats.
    unsafe { module.launch("scale", dims([2, 1]), &args) }?;
    let mut bytes = vec![0; 1200];
    device.download(&output, 0, &mut bytes)?;
    let expected = values
        .iter()
        .map(|value| value * -2.0 + 0.25)
        .collect::<Vec<_>>();
    assert_eq!(floats_of(&bytes), expected);
    let mut tail = [0; 8];
    device.download(&output, 1192, &mut tail)?;
    assert_eq!(floats_of(&tail), expected[298..]);
    Ok(())
}

fn a_layer_runs(harness: &Harness) {
    let device = harness.open();
    // A new thread has no current device of its own.
    std::thread::scope(|scope| {
        scope
            .spawn(|| scale(harness, &*device).unwrap())
            .join()
            .unwrap()
    });
    drop(device);
    let mut expected = vec![
        "load m1, an ELF file",
        "alloc a1 of 1204 on s1",
        "alloc a2 of 1200 on s1",
        "pin 1048576 flags 1",
        "upload 1200 to a1+4 on s1",
        "create e1 flags 2",
        "record e1 on s1",
        "launch scale grid 2 1 1 block 256 1 1 shared 0 on s1 params -2 a1+4 a2+0 300 0.25",
        "download 1200 from a2+0 on s1",
        "synchronize s1",
        "download 8 from a2+1192 on s1",
        "synchronize s1",
        "free a2 on s1",
        "free a1 on s1",
        "synchronize s1",
        "unload m1",
        "synchronize e1",
        "unpin 1048576",
        "destroy e1",
        "destroy s1",
    ];
    let log = log();
    // CUDA also retains a context.
    expected.extend(Some(harness.words.last).filter(|last| !last.is_empty()));
    let start = log
        .iter()
        .position(|line| line.starts_with("load"))
        .unwrap();
    assert_eq!(log[start..], expected);
    assert!(log[..start].contains(&"create s1 flags 1".to_string()));
    assert!(log[..start].contains(&"pool attribute 4 = ffffffffffffffff".to_string()));
}

fn without_pools(harness: &Harness) {
    let device = harness.open();
    assert!(!streams(&*device).gpu_info().pools);
    scale(harness, &*device).unwrap();
    let log = log();
    assert!(log.contains(&"alloc a1 of 1204".to_string()), "{log:?}");
    assert!(log.contains(&"free a1".to_string()), "{log:?}");
    assert!(
        !log.iter().any(|line| line.starts_with("pool")),
        "there is no pool to set: {log:?}"
    );
}

fn pools_that_refuse(harness: &Harness) {
    scale(harness, &*harness.open()).unwrap();
    let log = log();
    assert!(log.contains(&"alloc a1 of 1204".to_string()), "{log:?}");
    assert!(log.contains(&"free a1".to_string()), "{log:?}");
}

fn unavailable(harness: &Harness) -> [String; 2] {
    let errors = [
        (harness.open)(0).expect_err("no device").to_string(),
        (harness.count)().expect_err("no device").to_string(),
    ];
    let start = format!("no `{}` device is available: ", harness.backend);
    assert!(errors.iter().all(|e| e.starts_with(&start)), "{errors:?}");
    errors
}

fn no_driver(harness: &Harness) {
    for error in unavailable(harness) {
        let tried = format!("`{}` (", harness.library);
        assert!(error.contains(&tried), "{error}");
        assert!(error.contains("; install "), "{error}");
    }
}

fn no_graphs(harness: &Harness) {
    let missing = format!("has no symbol `{}`", (harness.symbol)("graph_instantiate"));
    for error in unavailable(harness) {
        assert!(error.contains(&missing), "{error}");
        assert!(
            error.contains("CUDA 11.4 or later") || error.contains("ROCm 6.0 or later"),
            "{error}"
        );
    }
}

fn no_gpu(harness: &Harness) {
    let expected = format!("available: {}: some words", harness.words.no_device);
    for error in unavailable(harness) {
        assert!(error.ends_with(&expected), "{error}");
    }
}

fn wrong_gpu(harness: &Harness) {
    check_part((harness.open)(2), "GPU 2 was asked for; the ");
    check_part((harness.open)(2), " has 2, counted from 0");
    assert_eq!((harness.count)().unwrap(), 2);
    assert_eq!(
        streams(&*(harness.open)(1).unwrap()).gpu_info().ordinal,
        1,
        "the other one is there"
    );
}

fn out_of_memory(harness: &Harness) {
    check_error(
        harness.open().alloc(1 << 40),
        "out of device memory: 1099511627776 bytes were requested (4096 bytes are free)",
    );
}

fn refused_binary(harness: &Harness) {
    let words = &harness.words;
    check_error(
        harness.open().load(&harness.artifact(), &[entry()]),
        &format!(
            "cannot load kernel `scale`: {}: some words; it was compiled by {}, and {}",
            words.no_binary, words.compiler, words.driver
        ),
    );
}

fn refused_launch(harness: &Harness) {
    check_error(
        scale(harness, &*harness.open()),
        &format!(
            "launch of kernel `scale` failed: {}: some words; grid 2 x 1, 256 threads, 0 bytes of \
             dynamic shared memory",
            harness.words.out_of_resources
        ),
    );
}

fn bad_requests(harness: &Harness) {
    let device = harness.open();
    let module = harness.load(&*device);
    let launch = |symbol: &str, grid, args: &[Arg]| {
        // SAFETY: each launch is refused, or has nothing to do.
        unsafe { module.launch(symbol, dims(grid), args) }
    };
    let nothing = nothing();
    launch("scale", [0, 1], &nothing).unwrap();
    check_part(
        launch("gone", [1, 1], &nothing),
        "it was not loaded; loaded are: scale",
    );
    check_part(
        launch("scale", [1, 1], &nothing[1..]),
        "it takes 5 arguments and got 4",
    );
    check_part(
        launch("scale", [0, 1], &nothing[1..]),
        "it takes 5 arguments and got 4",
    );
    check_part(
        launch("scale", [1, 70_000], &nothing),
        "a grid of 1 x 70000 blocks is too large",
    );
    assert!(!log().iter().any(|line| line.starts_with("launch")));

    let buffer = device.alloc(0).unwrap();
    assert_ne!(buffer.ptr().0, 0);
    check_error(
        device.upload(&[1, 2], &buffer, 0),
        "upload of 2 bytes at byte 0 failed: the buffer holds 0 bytes",
    );
    check_part(
        device.download(&buffer, usize::MAX, &mut [0; 2]),
        "download of 2 bytes at byte ",
    );
    device.upload(&[], &buffer, 0).unwrap();
    assert!(!log().iter().any(|line| line.contains("load 2 ")));
}

fn bad_entries(harness: &Harness) {
    let device = harness.open();
    let refusal = |artifact: &Artifact, entry: Entry, part: &str| {
        check_part(device.load(artifact, &[entry]), part);
    };
    let artifact = harness.artifact();
    let mut short = entry();
    short.params.pop();
    refusal(
        &artifact,
        short,
        "`scale` declares 4 parameters, the binary takes 5",
    );
    let mut gone = entry();
    gone.symbol = "gone".to_string();
    refusal(&artifact, gone, "cannot load kernel `gone`: ");
    let mut odd = entry();
    odd.symbol = "sc\0ale".to_string();
    refusal(&artifact, odd, "its name holds a NUL");
    let most = streams(&*device).gpu_info().shared_bytes;
    let mut greedy = entry();
    greedy.launch.shared_bytes = most - 1000;
    let name = &device.info().name;
    let text = format!(
        "cannot load kernel `scale`: it needs {} bytes of shared memory per block ({} dynamic, \
         1024 static), {name} has {most}: choose a smaller tile or fewer stages",
        most + 24,
        most - 1000
    );
    refusal(&artifact, greedy, &text);
    let rubbish = Artifact {
        binary: b"\x7fELF".to_vec(),
        report: Default::default(),
    };
    refusal(&rubbish, entry(), "not a readable ELF file");
}

fn facts(harness: &Harness) {
    let device = harness.open();
    let facts = streams(&*device).gpu_info();
    assert_eq!(facts.driver.as_deref(), Some(harness.words.driver));
    assert!(facts.pools && facts.lanes.is_some() && facts.l2_bytes.is_some());
    assert!(facts.clock_khz.unwrap() > 1_000_000);
    let reaches = |peer| streams(&*device).reaches(peer);
    assert!(reaches(0).unwrap() && reaches(1).unwrap());
    check_part(reaches(5), "peer query for GPU 5 failed: ");
    assert_eq!(device.capturing(), None);
}

fn peers(harness: &Harness) {
    let device = harness.open();
    let admit = |peer| streams(&*device).admit(peer);
    let admissions = || {
        let log = log();
        let lines = log.iter().filter(|line| line.starts_with("pool access"));
        lines.cloned().collect::<Vec<_>>()
    };
    admit(0).unwrap();
    assert_eq!(admissions(), [""; 0], "a GPU reaches its own memory");
    admit(1).unwrap();
    assert_eq!(admissions(), ["pool access 3 of place 1 1"]);
    check_part(admit(5), "peer query for GPU 5 failed: ");
}

fn occupancy(harness: &Harness) {
    let device = harness.open();
    let module = harness.load(&*device);
    let blocks = |symbol| streams(&*device).occupancy(&*module, symbol, 128, 4096);
    assert_eq!(blocks("scale").unwrap(), 16);
    assert!(log().contains(&"occupancy of scale at 128 threads and 4096 bytes".to_string()));
    check_error(
        blocks("gone"),
        "occupancy of kernel `gone` failed: it was not loaded; loaded are: scale",
    );
}

/// Uploads `length` bytes `times` times, and changes them after each call. Returns the calls that
/// reached the driver.
fn upload_often(device: &dyn Device, length: usize, times: u8) -> Vec<String> {
    let buffer = device.alloc(length * usize::from(times)).unwrap();
    let start = log().len();
    let mut bytes = vec![0; length];
    for time in 0..times {
        bytes.fill(time + 1);
        device
            .upload(&bytes, &buffer, length * usize::from(time))
            .unwrap();
    }
    bytes.fill(0);
    let calls = log()[start..].to_vec();
    let mut back = vec![0; length * usize::from(times)];
    device.download(&buffer, 0, &mut back).unwrap();
    for (time, part) in back.chunks(length).enumerate() {
        assert!(part.iter().all(|byte| *byte as usize == time + 1), "{time}");
    }
    calls
}

/// Small uploads pass through pinned memory: the host waits for nothing before the fifth, and then
/// only for the first.
fn small_uploads(harness: &Harness) {
    let device = harness.open();
    let length = 256 << 10;
    let mut expected = vec!["pin 1048576 flags 1".to_string()];
    for upload in 0..6 {
        let event = upload % 4 + 1;
        expected.extend((upload > 3).then(|| format!("synchronize e{event}")));
        let to = upload * length;
        expected.push(format!("upload {length} to a1+{to} on s1"));
        expected.extend((upload < 4).then(|| format!("create e{event} flags 2")));
        expected.push(format!("record e{event} on s1"));
    }
    assert_eq!(upload_often(&*device, length, 6), expected);
    assert_eq!(upload_often(&*device, 3, 2)[0], "synchronize e3");
}

/// Large uploads are read in place.
fn large_uploads(harness: &Harness) {
    let device = harness.open();
    let length = (256 << 10) + 1;
    let expected = [
        "upload 262145 to a1+0 on s1".to_string(),
        "synchronize s1".to_string(),
    ];
    assert_eq!(upload_often(&*device, length, 1), expected);
}

fn waited_for(harness: &Harness) {
    let calls = upload_often(&*harness.open(), 8, 5);
    let waits = calls.iter().filter(|line| *line == "synchronize s1");
    assert_eq!(waits.count(), 5, "{calls:?}");
}

fn uploads_of_many_threads(harness: &Harness) {
    let device = harness.open();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| upload_often(&*device, 1000, 8));
        }
    });
}

/// Nobody waits for the last uploads, but their stream does before it frees the memory.
fn uploads_left_behind(harness: &Harness) {
    let device = harness.open();
    let buffer = device.alloc(64).unwrap();
    for byte in 0..3 {
        device.upload(&[byte; 64], &buffer, 0).unwrap();
    }
}

/// The caller may drop the binary once it is loaded.
fn an_image_may_go(harness: &Harness) {
    let device = harness.open();
    let mut artifact = harness.artifact();
    let module = device.load(&artifact, &[entry()]).unwrap();
    artifact.binary.fill(0);
    // SAFETY: it touches nothing.
    unsafe { module.launch("scale", dims([1, 1]), &nothing()) }.unwrap();
    drop(module);
}

fn pinned_and_copied(harness: &Harness) {
    let device = harness.open();
    let gpu = streams(&*device);
    let mut host = gpu.pinned(12).unwrap();
    assert_eq!(host[..], [0; 12], "no old contents");
    host.copy_from_slice(b"twelve bytes");
    let (a, b) = (device.alloc(16).unwrap(), device.alloc(20).unwrap());
    device.upload(&host, &a, 4).unwrap();
    host.fill(0);
    let copy = DeviceCopy {
        from: &a,
        from_offset: 4,
        to: &b,
        to_offset: 8,
        bytes: 12,
    };
    gpu.copy(&copy).unwrap();
    let mut back = gpu.pinned(12).unwrap();
    device.download(&b, 8, &mut back).unwrap();
    assert_eq!(&back[..], b"twelve bytes");
    let too_long = DeviceCopy { bytes: 13, ..copy };
    check_error(
        gpu.copy(&too_long),
        "copy of 13 bytes at byte 4 failed: the buffer holds 16 bytes",
    );
    let nothing = DeviceCopy { bytes: 0, ..copy };
    gpu.copy(&nothing).unwrap();
    let copies: Vec<String> = log()
        .into_iter()
        .filter(|line| line.starts_with("copy"))
        .collect();
    assert_eq!(copies, ["copy 12 from a1+4 to a2+8 on s1"]);
}

fn rows_copied(harness: &Harness) {
    let device = harness.open();
    let (a, b) = (device.alloc(16).unwrap(), device.alloc(20).unwrap());
    device.upload(b"0123456789abcdef", &a, 0).unwrap();
    device.upload(&[b'-'; 20], &b, 0).unwrap();
    let copy = RowCopy {
        from: &a,
        from_offset: 1,
        from_stride: 5,
        to: &b,
        to_offset: 2,
        to_stride: 7,
        rows: 3,
        row_bytes: 4,
    };
    device.copy_rows(&copy).unwrap();
    let mut back = [0; 20];
    device.download(&b, 0, &mut back).unwrap();
    assert_eq!(&back, b"--1234---6789---bcde");
    for wrong in [
        RowCopy { rows: 4, ..copy },
        RowCopy {
            to_stride: 3,
            ..copy
        },
    ] {
        device.copy_rows(&wrong).unwrap_err();
    }
    device.copy_rows(&RowCopy { rows: 0, ..copy }).unwrap();
    let copies = log().into_iter().filter(|line| line.starts_with("copy"));
    let expected = "copy 3 rows of 4 from a1+1 by 5 to a2+2 by 7 on s1";
    assert_eq!(copies.collect::<Vec<_>>(), [expected]);
}

fn buffers_outlive_the_device(harness: &Harness) {
    let device = harness.open();
    let module = harness.load(&*device);
    let buffer = device.alloc(64).unwrap();
    let pinned = streams(&*device).pinned(8).unwrap();
    let event = streams(&*device).record().unwrap();
    drop(device);
    let count = log().len();
    event.synchronize().unwrap();
    drop((buffer, pinned, module, event));
    let log = log();
    let log: Vec<&str> = log[count..].iter().map(String::as_str).collect();
    let mut expected = vec![
        "synchronize e1",
        "free a1 on s1",
        "unpin 8",
        "synchronize s1",
        "unload m1",
        "destroy e1",
        "destroy s1",
    ];
    expected.extend(Some(harness.words.last).filter(|last| !last.is_empty()));
    assert_eq!(log, expected);
}

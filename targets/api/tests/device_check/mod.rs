//! A check of everything that the device path does on a GPU, with one line per check, to run on
//! real hardware. The examples of the targets supply the kernels.

use moesaic_kernel::{
    Access, DType, Entry, KernelSource, Language, Launch, Param, ParamType, Scalar, Size, Stem,
    Target,
};
use moesaic_target::{
    Arg, Artifact, Buffer, Device, DeviceCopy, DeviceError, LaunchDims, Module, Ptr, StreamDevice,
};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

/// The target-specific part of the checks.
pub struct Backend {
    pub device: Result<Arc<dyn Device>, DeviceError>,
    pub language: Language,
    /// The source of kernels `scale` and `crash`, and of those of `extra`.
    pub text: &'static str,
    pub compile: Compile,
    pub extra: Extra,
}

pub type Compile = Box<dyn Fn(&KernelSource) -> Result<Artifact, Box<dyn Error>>>;

/// Kernels and checks that only one target has.
pub type Extra = fn() -> (Vec<Entry>, Vec<Check>);

/// A name and a check, which returns a line of facts.
pub type Check = (&'static str, fn(&Bench) -> Outcome);
pub type Outcome = Result<String, Box<dyn Error>>;

/// The common state of all checks.
pub struct Bench {
    pub device: Arc<dyn Device>,
    pub module: Arc<dyn Module>,
    pub artifact: Artifact,
    pub entries: Vec<Entry>,
}

/// The floats of small tests, and the bytes of large copies.
const COUNT: usize = 1 << 20;
const LARGE: usize = 1 << 30;

const CHECKS: &[Check] = &[
    ("facts", facts),
    ("copies", copies),
    ("launch", launch),
    ("occupancy", occupancy),
    ("two streams", two_streams),
    ("graph", graph),
    ("copy bandwidth", copy_bandwidth),
    ("host bandwidth", host_bandwidth),
    ("launch times", launch_times),
    ("refused while capturing", refused_while_capturing),
    ("refused requests", refused_requests),
    ("memory that is not there", memory_that_is_not_there),
];

pub fn main(backend: Backend) -> ExitCode {
    let bench = match open(&backend) {
        Ok(bench) => bench,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let extra = (backend.extra)().1;
    // Must be last, because it breaks the device for this process.
    let fault: Check = ("a fault and its name", fault);
    let checks = CHECKS.iter().chain(&extra).chain([&fault]);
    let outcomes: Vec<bool> = checks.map(|check| report(&bench, check)).collect();
    let passed = outcomes.iter().filter(|outcome| **outcome).count();
    println!("{passed} of {} checks passed", outcomes.len());
    if passed == outcomes.len() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn report(bench: &Bench, (name, check): &Check) -> bool {
    match check(bench) {
        Ok(facts) => println!("ok    {name}: {facts}"),
        Err(error) => {
            println!("FAIL  {name}: {error}");
            return false;
        }
    }
    true
}

fn open(backend: &Backend) -> Result<Bench, Box<dyn Error>> {
    let device = match &backend.device {
        Ok(device) => device.clone(),
        Err(error) => return Err(error.to_string().into()),
    };
    let source = source(
        backend.language,
        backend.text,
        backend.extra,
        device.info().target,
    );
    let artifact = (backend.compile)(&source)?;
    let module = device.load(&artifact, &source.entries)?;
    Ok(Bench {
        device,
        module,
        artifact,
        entries: source.entries,
    })
}

/// Returns all kernels of the checks.
pub fn source(language: Language, text: &str, extra: Extra, target: Target) -> KernelSource {
    KernelSource {
        stem: Stem::Combine,
        name: "device_check".to_string(),
        target,
        language,
        text: text.to_string(),
        config: String::new(),
        entries: [vec![scale_entry(), crash_entry()], extra().0].concat(),
    }
}

pub fn entry(symbol: &str, params: Vec<Param>) -> Entry {
    Entry {
        symbol: symbol.to_string(),
        summary: String::new(),
        params,
        launch: Launch {
            grid: [Size::Tokens.ceil_div(256), Size::Const(1)],
            threads: 256,
            shared_bytes: 0,
            cluster: 1,
            dependent: false,
        },
    }
}

fn scale_entry() -> Entry {
    let float = |name: &str| Param {
        name: name.to_string(),
        ty: ParamType::Scalar(Scalar::F32),
        shape: String::new(),
    };
    let params = vec![
        float("factor"),
        Param::read("in", DType::F32, "[count]"),
        Param::write("out", DType::F32, "[count]"),
        Param::i64("count"),
        float("bias"),
    ];
    entry("scale", params)
}

fn crash_entry() -> Entry {
    let out = Param::tensor("out", DType::F32, Access::Write, "[1]");
    entry("crash", vec![out])
}

impl Bench {
    pub fn gpu(&self) -> Result<&dyn StreamDevice, DeviceError> {
        self.device.streams()
    }

    /// Launches `symbol` on the module's stream.
    pub fn launch(
        &self,
        module: &dyn Module,
        symbol: &str,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        let dims = LaunchDims {
            grid: [(COUNT / 256) as u64, 1],
            threads: 256,
            shared_bytes: 0,
            cluster: 1,
        };
        // SAFETY: the arguments are of the entry's kinds, and each check
        // passes buffers of `COUNT` floats, or means to be refused.
        unsafe { module.launch(symbol, dims, args) }
    }

    /// Computes `to = from * 2 + 1`, which is exact with and without a fused multiply-add.
    fn scale(&self, module: &dyn Module, from: &Buffer, to: &Buffer) -> Result<(), DeviceError> {
        let args = [
            Arg::F32(2.0),
            Arg::Ptr(from.ptr()),
            Arg::Ptr(to.ptr()),
            Arg::I64(COUNT as i64),
            Arg::F32(1.0),
        ];
        self.launch(module, "scale", &args)
    }

    /// Returns two buffers of `COUNT` floats, the first one with small integers.
    fn buffers(&self) -> Result<(Buffer, Buffer), DeviceError> {
        let (a, b) = (self.device.alloc(COUNT * 4)?, self.device.alloc(COUNT * 4)?);
        self.device.upload(&numbers(0), &a, 0)?;
        Ok((a, b))
    }

    /// Checks that the buffer holds the numbers scaled this many times.
    fn check(&self, buffer: &Buffer, times: u32) -> Result<(), Box<dyn Error>> {
        let mut bytes = vec![0; COUNT * 4];
        self.device.download(buffer, 0, &mut bytes)?;
        let expected = numbers(times);
        match (0..COUNT).find(|i| bytes[i * 4..][..4] != expected[i * 4..][..4]) {
            None => Ok(()),
            Some(i) => Err(format!("element {i} of {COUNT} is wrong").into()),
        }
    }
}

/// Returns `COUNT` floats, each one scaled this many times.
fn numbers(times: u32) -> Vec<u8> {
    let number = |i: usize| (0..times).fold((i % 1000) as f32, |value, _| value * 2.0 + 1.0);
    (0..COUNT).flat_map(|i| number(i).to_le_bytes()).collect()
}

fn facts(bench: &Bench) -> Outcome {
    Ok(format!(
        "{:?}, {:?}",
        bench.device.info(),
        bench.gpu()?.gpu_info()
    ))
}

fn copies(bench: &Bench) -> Outcome {
    let (a, _) = bench.buffers()?;
    bench.check(&a, 0)?;
    Ok(format!("{} bytes there and back", COUNT * 4))
}

fn launch(bench: &Bench) -> Outcome {
    let (a, b) = bench.buffers()?;
    bench.scale(&*bench.module, &a, &b)?;
    bench.check(&b, 1)?;
    Ok(format!("{COUNT} floats scaled"))
}

fn occupancy(bench: &Bench) -> Outcome {
    let blocks = bench.gpu()?.occupancy(&*bench.module, "scale", 256, 0)?;
    match blocks {
        0 => Err("no block fits".into()),
        blocks => Ok(format!("{blocks} blocks of 256 threads per multiprocessor")),
    }
}

fn two_streams(bench: &Bench) -> Outcome {
    let (gpu, (a, b)) = (bench.gpu()?, bench.buffers()?);
    let other = gpu.fork()?;
    let on_other = other.adopt(&*bench.module)?;
    for _ in 0..10 {
        bench.scale(&*bench.module, &a, &b)?;
        other.wait(&*gpu.record()?)?;
        bench.scale(&*on_other, &b, &a)?;
        gpu.wait(&*other.record()?)?;
    }
    // 2^20 times a number below 1000 is no longer exact, but the bits still agree.
    bench.check(&a, 20)?;
    Ok("20 launches in turn on two streams".to_string())
}

fn graph(bench: &Bench) -> Outcome {
    let (gpu, (a, b)) = (bench.gpu()?, bench.buffers()?);
    gpu.begin_capture("check")?;
    bench.scale(&*bench.module, &a, &b)?;
    gpu.copy(&whole(&b, &a, COUNT * 4))?;
    let graph = gpu.end_capture()?;
    bench.check(&a, 0)?;
    for _ in 0..3 {
        // SAFETY: both buffers live until the check below.
        unsafe { graph.launch() }?;
    }
    bench.check(&a, 3)?;
    Ok("captured once, launched three times".to_string())
}

fn whole<'a>(from: &'a Buffer, to: &'a Buffer, bytes: usize) -> DeviceCopy<'a> {
    DeviceCopy {
        from,
        from_offset: 0,
        to,
        to_offset: 0,
        bytes,
    }
}

fn copy_bandwidth(bench: &Bench) -> Outcome {
    let gpu = bench.gpu()?;
    let (a, b) = (bench.device.alloc(LARGE)?, bench.device.alloc(LARGE)?);
    gpu.copy(&whole(&a, &b, LARGE))?;
    let start = gpu.record()?;
    for _ in 0..10 {
        gpu.copy(&whole(&a, &b, LARGE))?;
    }
    let milliseconds = gpu.record()?.elapsed_ms(&*start)?;
    let rate = 20.0 * LARGE as f64 / f64::from(milliseconds) / 1e9;
    Ok(format!("{rate:.3} TB/s read and written"))
}

fn host_bandwidth(bench: &Bench) -> Outcome {
    let bytes = LARGE / 8;
    let buffer = bench.device.alloc(bytes)?;
    let mut pinned = bench.gpu()?.pinned(bytes)?;
    let pageable = vec![1; bytes];
    let rate = |start: Instant| bytes as f64 / start.elapsed().as_secs_f64() / 1e9;
    bench.device.upload(&pageable, &buffer, 0)?;
    bench.device.synchronize()?;
    let start = Instant::now();
    bench.device.upload(&pageable, &buffer, 0)?;
    bench.device.synchronize()?;
    let slow = rate(start);
    let start = Instant::now();
    bench.device.upload(&pinned, &buffer, 0)?;
    let up = rate(start);
    let start = Instant::now();
    bench.device.download(&buffer, 0, &mut pinned)?;
    let down = rate(start);
    Ok(format!(
        "{slow:.1} GB/s up from pageable memory, {up:.1} from pinned, {down:.1} down"
    ))
}

fn launch_times(bench: &Bench) -> Outcome {
    const LAUNCHES: u32 = 1000;
    let (gpu, (a, b)) = (bench.gpu()?, bench.buffers()?);
    bench.device.synchronize()?;
    let start = Instant::now();
    for _ in 0..LAUNCHES {
        bench.scale(&*bench.module, &a, &b)?;
    }
    let queued = start.elapsed().as_secs_f64() * 1e6 / f64::from(LAUNCHES);
    bench.device.synchronize()?;
    let whole = start.elapsed().as_secs_f64() * 1e6 / f64::from(LAUNCHES);
    gpu.begin_capture("many")?;
    for _ in 0..LAUNCHES {
        bench.scale(&*bench.module, &a, &b)?;
    }
    let graph = gpu.end_capture()?;
    let start = gpu.record()?;
    // SAFETY: both buffers live until the event has passed.
    unsafe { graph.launch() }?;
    let graph = gpu.record()?.elapsed_ms(&*start)? * 1e3 / LAUNCHES as f32;
    Ok(format!(
        "{queued:.2} us to queue a launch, {whole:.2} us to its end, {graph:.2} us in a graph"
    ))
}

/// Returns the text of an expected error.
pub fn refusal<T>(result: Result<T, DeviceError>, part: &str) -> Outcome {
    match result {
        Ok(_) => Err(format!("nothing said {part:?}").into()),
        Err(error) if error.to_string().contains(part) => Ok(error.to_string()),
        Err(error) => Err(format!("{error} (which does not say {part:?})").into()),
    }
}

fn refused_while_capturing(bench: &Bench) -> Outcome {
    let (gpu, (a, b)) = (bench.gpu()?, bench.buffers()?);
    gpu.begin_capture("guarded")?;
    let part = "while graph `guarded` is being captured";
    let refusals = [
        refusal(bench.device.alloc(1).map(drop), part),
        refusal(bench.device.synchronize(), part),
        refusal(bench.device.upload(&[1], &a, 0), part),
        refusal(
            bench.device.load(&bench.artifact, &bench.entries).map(drop),
            part,
        ),
    ];
    bench.scale(&*bench.module, &a, &b)?;
    drop(gpu.end_capture()?);
    let texts = refusals.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(texts[3].clone())
}

fn refused_requests(bench: &Bench) -> Outcome {
    let mut greedy = scale_entry();
    greedy.launch.shared_bytes = 1 << 20;
    let loaded = bench.device.load(&bench.artifact, &[greedy]);
    let text = refusal(loaded, "bytes of shared memory per block")?;
    let mut gone = scale_entry();
    gone.symbol = "gone".to_string();
    refusal(bench.device.load(&bench.artifact, &[gone]), "`gone`")?;
    Ok(text)
}

fn memory_that_is_not_there(bench: &Bench) -> Outcome {
    refusal(bench.device.alloc(1 << 50), "out of device memory")
}

fn fault(bench: &Bench) -> Outcome {
    println!("      now a kernel writes where nothing is; some drivers end the process here");
    bench.device.synchronize()?;
    bench.launch(&*bench.module, "crash", &[Arg::Ptr(Ptr(1 << 52))])?;
    let text = refusal(bench.device.synchronize(), "kernel `crash`")?;
    refusal(bench.device.alloc(1), "the GPU is lost to this process")?;
    Ok(text)
}

//! Hand-written PTX in the machine.

pub mod lanes;

use moesaic_kernel::{Access, DType, Entry, Launch, Param, SimArch, Size, Target};
use moesaic_ptx::{CheckSet, Finding, PtxDevice, PtxOptions, artifact_of_ptx};
use moesaic_target::{Arg, Device, KernelCounters, LaunchDims};
use std::num::NonZeroUsize;

/// A launch of a kernel `k` with one buffer of words.
#[derive(Clone)]
pub struct Run {
    pub threads: u32,
    pub grid: [u64; 2],
    pub shared_bytes: u32,
    pub cluster: u32,
    pub dependent: bool,
    pub seed: u64,
    /// Contents of the buffer, in words; the rest stays unwritten.
    pub input: Vec<u32>,
    /// Words of the buffer.
    pub words: usize,
    pub workers: usize,
}

impl Default for Run {
    fn default() -> Run {
        Run {
            threads: 32,
            grid: [1, 1],
            shared_bytes: 0,
            cluster: 1,
            dependent: false,
            seed: 1,
            input: vec![0; 4096],
            words: 4096,
            workers: 1,
        }
    }
}

/// The state after a launch.
#[derive(Debug)]
pub struct Left {
    pub words: Vec<u32>,
    pub counters: KernelCounters,
}

/// Returns a kernel around `body`. `%rd1` is the buffer and `%r1` the thread;
/// `%p0-15`, `%r0-99`, `%f0-99`, `%rd0-99`, `%h0-19` are free otherwise. `sm`
/// is dynamic shared memory, `st` 4096 bytes of static.
pub fn kernel(body: &str) -> String {
    format!(
        ".version 8.6\n.target sm_90a\n.address_size 64\n\
         .extern .shared .align 1024 .b8 sm[];\n\
         .visible .entry k(.param .u64 k_param_0)\n.maxntid 1024, 1, 1\n{{\n\
         .reg .pred %p<16>;\n.reg .b32 %r<100>;\n.reg .f32 %f<100>;\n.reg .b64 %rd<100>;\n\
         .reg .f64 %fd<20>;\n.reg .b16 %h<20>;\n.shared .align 1024 .b8 st[4096];\n\
         ld.param.u64 %rd1, [k_param_0];\ncvta.to.global.u64 %rd1, %rd1;\n\
         mov.u32 %r1, %tid.x;\n{body}\nret;\n}}\n"
    )
}

impl Run {
    /// Runs `body`; returns the finding if the kernel has a defect.
    pub fn run(&self, body: &str) -> Result<Left, Box<Finding>> {
        let arch = match "sim:sm_90a".parse() {
            Ok(Target::Sim(SimArch::Cuda(arch))) => arch,
            other => panic!("{other:?}"),
        };
        let options = PtxOptions {
            seed: self.seed,
            threads: NonZeroUsize::new(self.workers),
            checks: CheckSet::Full,
        };
        let device = PtxDevice::new(arch, options);
        let entry = Entry {
            symbol: "k".to_string(),
            summary: String::new(),
            params: vec![Param::tensor("x", DType::I32, Access::ReadWrite, "")],
            launch: Launch {
                grid: [Size::Const(1), Size::Const(1)],
                threads: self.threads,
                shared_bytes: self.shared_bytes,
                cluster: self.cluster,
                dependent: self.dependent,
            },
        };
        let module = device
            .load(&artifact_of_ptx(&kernel(body), ""), &[entry])
            .unwrap_or_else(|error| panic!("{error}"));
        let buffer = device.alloc(4 * self.words).unwrap();
        let bytes: Vec<u8> = self.input.iter().flat_map(|v| v.to_le_bytes()).collect();
        device.upload(&bytes, &buffer, 0).unwrap();
        let dims = LaunchDims {
            grid: self.grid,
            threads: self.threads,
            shared_bytes: self.shared_bytes,
            cluster: self.cluster,
        };
        // SAFETY: the kernel's one parameter is the buffer, which lives.
        let result = unsafe { module.launch("k", dims, &[Arg::Ptr(buffer.ptr())]) };
        if let Err(error) = result {
            let finding = device.findings().pop();
            return Err(Box::new(finding.unwrap_or_else(|| panic!("{error}"))));
        }
        let mut bytes = vec![0; 4 * self.words];
        device.download(&buffer, 0, &mut bytes).unwrap();
        let word = |part: &[u8]| u32::from_le_bytes([part[0], part[1], part[2], part[3]]);
        Ok(Left {
            words: bytes.chunks_exact(4).map(word).collect(),
            counters: device.take_counters().remove(0),
        })
    }
}

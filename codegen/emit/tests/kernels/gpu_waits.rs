//! Kernels whose launches overlap, in their machine code: nothing touches global memory before the
//! wait for the launches before, whose writes it may read.

use crate::gpu_compile::{deepseek_v3, mixtral};
use moesaic_emit::emit;
use moesaic_harness::kept::Kept;
use moesaic_harness::thorough::in_turns;
use moesaic_kernel::Target;
use moesaic_plan::{PlanOptions, Training, plan};
use moesaic_target::{CompileOptions, Compiler};
use moesaic_toolchain::testing;
use object::{Object, ObjectSection};

/// Opcodes of sm_90 and later, the low 12 bits of an instruction of 16 bytes, as nvdisasm names them.
const ACQBULK: u16 = 0x82e; // griddepcontrol.wait
const ACCESSES: [(u16, &str); 7] = [
    (0x381, "LDG"),
    (0x981, "LDG"),
    (0x97e, "LDG"),
    (0x386, "STG"),
    (0x986, "STG"),
    (0xfae, "LDGSTS"),
    (0x5b4, "UTMALDG"),
];

/// The code of each kernel of a cubin: its sections `.text.NAME`.
fn codes(cubin: &[u8]) -> Vec<(String, Vec<u8>)> {
    let elf = object::File::parse(cubin).unwrap();
    let kernels = elf.sections().filter_map(|section| {
        let kernel = section.name().ok()?.strip_prefix(".text.")?.to_string();
        Some((kernel, section.data().ok()?.to_vec()))
    });
    kernels.collect()
}

/// Returns the accesses to global memory before the first wait.
fn early(code: &[u8]) -> Vec<&'static str> {
    let opcodes = code.chunks_exact(16);
    let opcodes: Vec<u16> = opcodes
        .map(|word| u16::from_le_bytes([word[0], word[1]]) & 0xfff)
        .collect();
    let wait = opcodes.iter().position(|opcode| *opcode == ACQBULK);
    let before = &opcodes[..wait.expect("the kernel waits for the launches before it")];
    let named = |opcode: &u16| ACCESSES.iter().find(|access| access.0 == *opcode);
    before
        .iter()
        .filter_map(named)
        .map(|access| access.1)
        .collect()
}

#[test]
fn nothing_is_touched_before_the_wait() {
    let compiler = Kept::new(testing::nvrtc());
    for (n, arch) in ["sm_90a", "sm_120a"].into_iter().enumerate() {
        let target: Target = format!("cuda:{arch}").parse().unwrap();
        for spec in in_turns(n, [mixtral(), deepseek_v3()]) {
            let forward = plan(&spec, target, &PlanOptions::default()).unwrap();
            let training = PlanOptions::training(Training::default());
            let both = [forward, plan(&spec, target, &training).unwrap()];
            for kernel in both.iter().flat_map(|plan| &plan.kernels) {
                let source = emit(kernel, target).unwrap();
                let artifact = compiler.compile(&source, &CompileOptions::default());
                let cubin = artifact.unwrap_or_else(|error| panic!("{error}")).binary;
                let codes = codes(&cubin);
                assert!(!codes.is_empty(), "{} for {target}", kernel.name);
                for (entry, code) in codes {
                    let early = early(&code);
                    assert!(
                        early.is_empty(),
                        "{entry} for {target}: {early:?} before the wait"
                    );
                }
            }
        }
    }
}

//! Rows between nodes, on this CPU and on simulators: the bytes that the reference writes,
//! and the values that it reads.

use crate::one_kernel::{machine, waiting};
use half::{bf16, f16};
use moesaic_emit::emit;
use moesaic_harness::dims;
use moesaic_harness::kept::Kept;
use moesaic_kernel::{DType, Entry, KernelSource, Target};
use moesaic_plan::{CacheClass, CommCastDesc, CommDtype, KernelPlan, Operator, TileMachine};
use moesaic_reference::{Random, pack_row, unpack_row};
use moesaic_target::{Arg, Buffer, CompileOptions, Compiler, Device, Module};
use moesaic_toolchain::testing;
use std::sync::Arc;

const FORMATS: [CommDtype; 4] = [
    CommDtype::F16,
    CommDtype::Bf16,
    CommDtype::Fp8,
    CommDtype::Mxfp8,
];
const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

fn kernel(desc: &CommCastDesc, target: Target) -> KernelPlan {
    let config = desc.tiling(TileMachine::of(target, CacheClass::default()));
    let entries = waiting(desc.entries(&config), target);
    KernelPlan {
        name: "comm_cast".to_string(),
        entries,
        op: desc.clone().with(config),
    }
}

fn twin(comm_dtype: CommDtype) -> moesaic_reference::CommDtype {
    match comm_dtype {
        CommDtype::F16 => moesaic_reference::CommDtype::F16,
        CommDtype::Bf16 => moesaic_reference::CommDtype::Bf16,
        CommDtype::Fp8 => moesaic_reference::CommDtype::Fp8,
        CommDtype::Mxfp8 => moesaic_reference::CommDtype::Mxfp8,
        CommDtype::Unchanged => panic!("nothing packs exact rows"),
    }
}

/// The kernel of some rows, loaded.
struct Loaded {
    desc: CommCastDesc,
    entries: Vec<Entry>,
    device: Arc<dyn Device>,
    module: Arc<dyn Module>,
    what: String,
}

impl Loaded {
    fn new(desc: &CommCastDesc, target: Target) -> Loaded {
        let source = emit(&kernel(desc, target), target).unwrap();
        let (device, compile) = machine(target);
        Loaded {
            module: device.load(&compile(&source), &source.entries).unwrap(),
            what: format!("{desc:?} on {target}"),
            entries: source.entries,
            desc: desc.clone(),
            device,
        }
    }

    fn buffer(&self, bytes: &[u8]) -> Buffer {
        let buffer = self.device.alloc(bytes.len().max(64)).unwrap();
        self.device.upload(bytes, &buffer, 0).unwrap();
        buffer
    }

    fn read(&self, buffer: &Buffer, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        self.device.download(buffer, 0, &mut read).unwrap();
        read
    }

    fn launch(&self, symbol: &str, buffers: &[&Buffer], tokens: usize) {
        let entry = self.entries.iter().find(|e| e.symbol == symbol).unwrap();
        let tensors = buffers.iter().map(|buffer| Arg::Ptr(buffer.ptr()));
        let args: Vec<Arg> = tensors.chain([Arg::I64(tokens as i64)]).collect();
        let dims = dims(&entry.launch, tokens);
        if !dims.grid.contains(&0) {
            // SAFETY: buffers are as large as the entry's shapes say for so many rows.
            unsafe { self.module.launch(symbol, dims, &args) }.unwrap();
        }
    }

    /// Packs the rows at `places`, and unpacks them where they were.
    fn check(&self, rows: &[Vec<f32>], places: &[i32]) {
        let list = places.iter().flat_map(|place| place.to_le_bytes());
        let list = self.buffer(&list.collect::<Vec<u8>>());
        let expected: Vec<(Vec<u8>, u64)> = places
            .iter()
            .map(|&place| pack_row(twin(self.desc.comm_dtype), &rows[place as usize]))
            .collect();
        let packed = self.check_packing(rows, &list, &expected);
        self.check_unpacking(rows.len(), places, [&packed, &list], &expected);
    }

    /// The packed rows are the expected bytes; as many values as expected were too large.
    fn check_packing(
        &self,
        rows: &[Vec<f32>],
        list: &Buffer,
        expected: &[(Vec<u8>, u64)],
    ) -> Buffer {
        let (tokens, row_bytes) = (expected.len(), self.desc.row_bytes());
        let stored = rows.iter().flat_map(|row| bytes_of(self.desc.rows, row));
        let from = self.buffer(&stored.collect::<Vec<u8>>());
        let packed = self.device.alloc((row_bytes * tokens).max(64)).unwrap();
        let counts = self.device.alloc(4 * tokens.max(16)).unwrap();
        let total = self.buffer(&5i64.to_le_bytes());
        if self.desc.counts() {
            self.launch("comm_cast_pack", &[&from, list, &packed, &counts], tokens);
            self.launch("comm_cast_count", &[&counts, &total], tokens);
        } else {
            self.launch("comm_cast_pack", &[&from, list, &packed], tokens)
        }
        let read = self.read(&packed, row_bytes * tokens);
        for (i, (row, (bytes, _))) in read.chunks(row_bytes).zip(expected).enumerate() {
            let at = row.iter().zip(bytes).position(|(a, b)| a != b);
            assert_eq!(row.len(), bytes.len(), "{}", self.what);
            assert_eq!(at, None, "{}: row {i}\n{row:?}\n{bytes:?}", self.what);
        }
        let saturated = expected.iter().map(|(_, count)| count).sum::<u64>();
        let counted = i64::from_le_bytes(self.read(&total, 8).try_into().unwrap());
        assert_eq!(counted as u64, 5 + saturated, "{}", self.what);
        packed
    }

    /// Unpacked rows are where they were; the others stay as they are.
    fn check_unpacking(
        &self,
        rows: usize,
        places: &[i32],
        [packed, list]: [&Buffer; 2],
        expected: &[(Vec<u8>, u64)],
    ) {
        let (width, dtype) = (self.desc.width, self.desc.rows);
        let size = width * dtype.size();
        let to = self.buffer(&vec![0xaa; rows * size]);
        self.launch("comm_cast_unpack", &[packed, list, &to], places.len());
        let came = |row: usize| places.iter().position(|&place| place as usize == row);
        for (row, bytes) in self.read(&to, rows * size).chunks(size).enumerate() {
            let expected = match came(row) {
                Some(i) => {
                    let comm_dtype = twin(self.desc.comm_dtype);
                    bytes_of(dtype, &unpack_row(comm_dtype, &expected[i].0, width, dtype))
                }
                None => vec![0xaa; size],
            };
            let at = bytes.iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!(at, None, "{}: row {row}, unpacked", self.what);
        }
    }
}

fn bytes_of(dtype: DType, values: &[f32]) -> Vec<u8> {
    let bytes = values.iter().map(|&value| match dtype {
        DType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        DType::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    });
    bytes.flatten().collect()
}

fn value_of(dtype: DType, bits: u64) -> f32 {
    match dtype {
        DType::F16 => f16::from_bits(bits as u16).to_f32(),
        DType::Bf16 => bf16::from_bits(bits as u16).to_f32(),
        _ => f32::from_bits(bits as u32),
    }
}

/// Rows of a kind each: any bits, ordinary values, values of any size with one large one,
/// rows that round near ties and subnormals of every format, zeros, edges.
fn rows(dtype: DType, width: usize, count: usize) -> Vec<Vec<f32>> {
    let edges = [
        65_503.9,
        65_504.0,
        65_519.99,
        65_520.0,
        1e6,
        f32::MAX,
        f32::INFINITY,
        f32::NAN,
        0.0,
        1e-40,
        6e-8,
        2.9e-8,
        3e-39,
        448.0,
        1.0,
        2f32.powi(-117),
        3.3895e38,
        0.015625,
    ];
    let mut random = Random::new(width as u64);
    let mut value = |row: usize, i: usize| {
        let (bits, signed) = (random.bits(), random.signed() as f32);
        let value = match row % 7 {
            0 => value_of(dtype, bits),
            1 => signed,
            2 => signed * 2f32.powi((bits % 40) as i32 - 20),
            // With a largest value of 448: multiples of half a step of its subnormals.
            3 if i.is_multiple_of(128) => 448.0,
            3 => (bits % 64) as f32 / 1024.0 * signed.signum() * (1.0 + signed / 4e6),
            4 => 0.0 * signed,
            5 => edges[bits as usize % edges.len()] * signed.signum(),
            _ => signed * 1e-37,
        };
        match dtype {
            DType::F16 => f16::from_f32(value).to_f32(),
            DType::Bf16 => bf16::from_f32(value).to_f32(),
            _ => value,
        }
    };
    let row = |row: usize| (0..width).map(|i| value(row, i)).collect();
    (0..count).map(row).collect()
}

fn run(target: &str, widths: &[usize], counts: &[usize]) {
    let target: Target = target.parse().unwrap();
    for (n, &width) in widths.iter().enumerate() {
        for comm_dtype in FORMATS {
            for (m, rows_type) in TYPES.into_iter().enumerate() {
                // Every width with every format, every type with some width.
                if widths.len() > 1 && (n + m) % TYPES.len() > 1 {
                    continue;
                }
                let desc = CommCastDesc {
                    comm_dtype,
                    width,
                    rows: rows_type,
                };
                let loaded = Loaded::new(&desc, target);
                for &count in counts {
                    let rows = rows(rows_type, width, count + 3);
                    // Backward, and not all of them.
                    let places: Vec<i32> = (1..=count as i32).rev().collect();
                    loaded.check(&rows, &places);
                }
            }
        }
    }
}

const WIDTHS: [usize; 6] = [1, 7, 40, 128, 130, 640];

#[test]
fn cpus_write_the_bytes_of_the_reference() {
    let host = moesaic_cpu::host_isa();
    run(&Target::Cpu(host).to_string(), &WIDTHS, &[0, 1, 33, 130]);
    for isa in ["cpu:portable", "cpu:avx2"] {
        if cfg!(target_arch = "x86_64") {
            run(isa, &[130], &[33]);
        }
    }
}

#[test]
fn simulated_amd_gpus_write_the_bytes_of_the_reference() {
    run("sim:gfx942", &[7, 130, 640], &[0, 1, 33]);
    run("sim:gfx1100", &[136], &[5]);
}

#[test]
fn simulated_nvidia_gpus_write_the_bytes_of_the_reference() {
    run("sim:sm_90a", &WIDTHS, &[0, 1, 33]);
    run("sim:sm_80", &[136], &[70]);
}

/// Widths of published models and awkward ones.
const COMPILED: [usize; 2] = [7168, 63];

fn compiled(kept: &Kept, backend: &str, archs: &[&str]) {
    for arch in archs {
        let target: Target = format!("{backend}:{arch}").parse().unwrap();
        for (comm_dtype, dtype) in FORMATS.into_iter().flat_map(|w| TYPES.map(|t| (w, t))) {
            for width in COMPILED {
                let desc = CommCastDesc {
                    comm_dtype,
                    width,
                    rows: dtype,
                };
                clean(kept, &emit(&kernel(&desc, target), target).unwrap());
            }
        }
    }
}

/// No spills, no stack, no word of warning.
fn clean(kept: &Kept, source: &KernelSource) {
    let artifact = kept.compile(source, &CompileOptions::default());
    let artifact = artifact.unwrap_or_else(|error| panic!("{error}\n{}", source.text));
    let what = format!("{} {}", source.target, source.config);
    assert_eq!(artifact.report.log, "", "{what}");
    assert_eq!(artifact.report.kernels.len(), source.entries.len());
    for report in &artifact.report.kernels {
        let stack = report.stack_bytes.unwrap_or(0);
        assert!(!report.spills() && stack == 0, "{what}: {report:?}");
        assert!(
            report.registers.is_some_and(|n| n > 0),
            "{what}: {report:?}"
        );
    }
}

#[test]
fn nvrtc_compiles_every_format() {
    let kept = Kept::new(testing::nvrtc());
    compiled(&kept, "cuda", &["sm_80", "sm_90a", "sm_100a"]);
}

#[test]
fn clang_compiles_every_format() {
    let kept = Kept::new(testing::rocm());
    compiled(&kept, "rocm", &["gfx90a", "gfx942", "gfx1100"]);
}

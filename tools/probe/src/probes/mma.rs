//! `mma.sync`, by the prelude's functions and in every form.

use super::{Probe, lanes, small};
use crate::bench::{Bench, File, Kernel, Takes, Trouble, Value};
use crate::random::Random;
use crate::report::{Row, same};
use moesaic_hardware::mma::{Accumulator, MmaElement, MmaKind, mma_sync};
use serde::Serialize;
use tera::Context;

const CASES: usize = 16;

/// The products that kernels use, then every form.
pub const PROBES: &[Probe] = &[
    Probe::new("mma, prelude", 80, prelude),
    Probe::new("mma, every form", 80, every_form),
];

/// A kernel of the template.
#[derive(Serialize)]
struct Form {
    symbol: String,
    a_registers: usize,
    b_registers: usize,
    c_registers: usize,
    sum_type: &'static str,
    to_sum: &'static str,
    from_sum: &'static str,
    statement: String,
}

fn prelude(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    let functions = [
        ("f32", 8, MmaElement::Tf32, "mma_16x8x8_tf32"),
        ("f16", 16, MmaElement::F16, "mma_16x8x16_f16"),
        ("bf16", 16, MmaElement::Bf16, "mma_16x8x16_bf16"),
    ];
    let mut rows = Vec::new();
    for (activations, k, element, function) in functions {
        let kind = MmaKind::new(k, element, Accumulator::F32);
        let call = |_: &MmaKind| format!("{function}(sums, left, right);");
        let kinds: Vec<MmaKind> = kind.into_iter().collect();
        rows.extend(run(bench, random, &kinds, Some(activations), call)?);
    }
    Ok(rows)
}

fn every_form(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    run(bench, random, &MmaKind::ALL, None, assembly)
}

/// Runs kinds from one file; with `activations`, by the prelude.
fn run(
    bench: &Bench,
    random: &mut Random,
    kinds: &[MmaKind],
    activations: Option<&str>,
    statement: impl Fn(&MmaKind) -> String,
) -> Result<Vec<Row>, Trouble> {
    let forms: Vec<Form> = kinds.iter().map(|k| form(*k, statement(k))).collect();
    let mut context = Context::new();
    context.insert("forms", &forms);
    context.insert("own", &activations.is_some());
    let kernels = forms.iter().map(|form| Kernel {
        symbol: form.symbol.clone(),
        threads: 32,
        shared_bytes: 0,
        cluster: 1,
        takes: vec![Takes::Words; 4],
    });
    let program = bench.load(File {
        name: "mma.cu",
        activations: activations.unwrap_or("bf16"),
        context,
        kernels: kernels.collect(),
    })?;
    let prefix = if activations.is_some() {
        "prelude "
    } else {
        ""
    };
    let mut rows = Vec::new();
    for kind in kinds {
        let (a, b, c) = operands(*kind, random);
        let mut d = vec![0; c.len()];
        let values = &mut [
            Value::Read(&a),
            Value::Read(&b),
            Value::Read(&c),
            Value::Words(&mut d),
        ];
        bench.run(&program, &symbol(*kind), CASES, values)?;
        let result = same("d", &d, &by_table(*kind, &a, &b, &c));
        rows.push(Row::compared(
            prefix.to_string() + &symbol(*kind),
            CASES,
            result,
        ));
    }
    Ok(rows)
}

/// Returns registers with small whole numbers.
fn operands(kind: MmaKind, random: &mut Random) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let element = kind.element();
    let mut fill = |registers: usize, word: &dyn Fn(&mut Random) -> u32| -> Vec<u32> {
        (0..CASES * registers * 32).map(|_| word(random)).collect()
    };
    let a = fill(kind.a_registers(), &|r| small(element, r));
    let b = fill(kind.b_registers(), &|r| small(element, r));
    let c = fill(kind.c_registers(), &|r| match kind.accumulator() {
        Accumulator::F32 => (r.range(-50, 50) as f32).to_bits(),
        Accumulator::F16 => small(MmaElement::F16, r),
        Accumulator::S32 => r.bits(),
    });
    (a, b, c)
}

fn by_table(kind: MmaKind, a: &[u32], b: &[u32], c: &[u32]) -> Vec<u32> {
    let [na, nb, nc] = [kind.a_registers(), kind.b_registers(), kind.c_registers()];
    let (a, b, c) = (lanes(a), lanes(b), lanes(c));
    let mut d = vec![[0; 32]; c.len()];
    for case in 0..CASES {
        mma_sync(
            kind,
            &a[case * na..],
            &b[case * nb..],
            &c[case * nc..],
            &mut d[case * nc..],
        );
    }
    d.concat()
}

/// Returns the names of the types in an instruction.
fn names(kind: MmaKind) -> (&'static str, &'static str) {
    let element = match kind.element() {
        MmaElement::F16 => "f16",
        MmaElement::Bf16 => "bf16",
        MmaElement::Tf32 => "tf32",
        MmaElement::S8 => "s8",
        MmaElement::U8 => "u8",
    };
    let accumulator = match kind.accumulator() {
        Accumulator::F32 => "f32",
        Accumulator::F16 => "f16",
        Accumulator::S32 => "s32",
    };
    (element, accumulator)
}

fn symbol(kind: MmaKind) -> String {
    let (element, accumulator) = names(kind);
    format!("mma_m16n8k{}_{accumulator}_{element}", kind.k())
}

fn form(kind: MmaKind, statement: String) -> Form {
    let float = kind.accumulator() == Accumulator::F32;
    Form {
        symbol: symbol(kind),
        a_registers: kind.a_registers(),
        b_registers: kind.b_registers(),
        c_registers: kind.c_registers(),
        sum_type: if float { "f32" } else { "u32" },
        to_sum: if float { "float_of" } else { "u32" },
        from_sum: if float { "bits_of" } else { "u32" },
        statement,
    }
}

/// Returns the instruction itself, for forms that no kernel uses yet.
fn assembly(kind: &MmaKind) -> String {
    let (element, accumulator) = names(*kind);
    let [na, nb, nc] = [kind.a_registers(), kind.b_registers(), kind.c_registers()];
    let group = |first: usize, count: usize| {
        let list: Vec<String> = (first..first + count).map(|i| format!("%{i}")).collect();
        format!("{{{}}}", list.join(", "))
    };
    let bind = |constraint: &str, name: &str, count: usize| {
        let list: Vec<String> = (0..count)
            .map(|i| format!("\"{constraint}\"({name}[{i}])"))
            .collect();
        list.join(", ")
    };
    let sums = match kind.accumulator() {
        Accumulator::F32 => "+f",
        _ => "+r",
    };
    format!(
        "asm volatile(\"mma.sync.aligned.m16n8k{}.row.col.{accumulator}.{element}.{element}.\
         {accumulator} {}, {}, {}, {};\" : {} : {}, {});",
        kind.k(),
        group(0, nc),
        group(nc, na),
        group(nc + na, nb),
        group(0, nc),
        bind(sums, "sums", nc),
        bind("r", "left", na),
        bind("r", "right", nb),
    )
}

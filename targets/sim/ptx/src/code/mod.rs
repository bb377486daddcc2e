//! Decoded kernels: from parsed text to instructions that run.

pub mod decode;
pub mod layout;
pub mod op;
mod registers;

use crate::error::PtxError;
use crate::text::{Class, EntryText, ModuleText, Parameter, Special};
use decode::Decoder;
use layout::Layout;
use op::{Instruction, Op, Row};
use std::collections::HashMap;

/// The content of a row behind the registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    Literal(u64),
    Special(Special),
}

/// Rows for literals and special registers, handed out on first use.
#[derive(Default)]
pub struct Pool {
    first: Row,
    pub sources: Vec<Source>,
    known: HashMap<Source, Row>,
}

impl Pool {
    fn new(first: Row) -> Pool {
        Pool {
            first,
            ..Pool::default()
        }
    }

    /// Returns the row that holds `source`.
    pub fn row(&mut self, source: Source) -> Row {
        let next = self.first + self.sources.len() as Row;
        *self.known.entry(source).or_insert_with(|| {
            self.sources.push(source);
            next
        })
    }
}

/// A kernel ready to run.
#[derive(Clone, Debug)]
pub struct Kernel {
    pub name: String,
    pub params: Vec<Parameter>,
    pub param_bytes: u32,
    pub max_threads: Option<u32>,
    /// Blocks per cluster, if the text fixes them.
    pub cluster: Option<u32>,
    pub code: Vec<Instruction>,
    /// Registers of the 32-bit file; the literals follow them.
    pub words: Row,
    pub word_sources: Vec<Source>,
    pub doubles: Row,
    pub double_sources: Vec<Source>,
    pub predicates: Row,
    /// End of the static shared variables, from the start of shared memory.
    pub static_shared: u32,
    /// Start of dynamic shared memory.
    pub dynamic_shared: u32,
    pub local_bytes: u32,
    /// The kernel contains wgmma.
    pub has_products: bool,
    /// For each instruction, the registers of any wgmma that it touches, and
    /// true for writes. The list is empty for a wgmma itself, whose registers
    /// are its D and A.
    pub touches: Vec<Box<[(Row, bool)]>>,
    /// The registers of each wgmma.
    pub products: HashMap<u32, ProductRows>,
    /// Results depend on the order in which blocks touch global memory.
    pub in_order: bool,
    /// Blocks may synchronise through global memory.
    pub synchronises: bool,
}

impl Kernel {
    /// Decodes one kernel. `globals` are the device addresses of the module's
    /// variables, by index.
    ///
    /// # Errors
    /// [`PtxError::Unsupported`] names the first instruction that the machine
    /// does not have.
    pub fn decode(
        module: &ModuleText,
        entry: &EntryText,
        globals: &[u64],
    ) -> Result<Kernel, PtxError> {
        let rows = registers::allocate(entry);
        let layout = Layout::of(module, entry, globals);
        let mut words = Pool::new(rows.count(Class::Word));
        let mut doubles = Pool::new(rows.count(Class::Double));
        let mut code = Vec::with_capacity(entry.statements.len() + 1);
        for statement in &entry.statements {
            let mut decoder = Decoder::new(statement, &rows, &layout, &mut words, &mut doubles);
            code.push(decoder.instruction()?);
        }
        code.push(decode::end(entry));
        let in_order = code
            .iter()
            .any(|instruction| orders_blocks(&instruction.op));
        let synchronises = code.iter().any(|instruction| synchronises(&instruction.op));
        let products = product_rows(&code);
        Ok(Kernel {
            name: entry.name.clone(),
            params: entry.params.clone(),
            param_bytes: entry.param_bytes,
            max_threads: entry.max_threads,
            cluster: entry.cluster,
            code,
            words: rows.count(Class::Word),
            word_sources: words.sources,
            doubles: rows.count(Class::Double),
            double_sources: doubles.sources,
            predicates: rows.count(Class::Predicate),
            static_shared: layout.static_shared,
            dynamic_shared: layout.dynamic_shared,
            local_bytes: layout.local_bytes,
            has_products: !products.is_empty(),
            touches: touches(entry, &rows, &products),
            products,
            in_order,
            synchronises,
        })
    }
}

/// The register operands of a wgmma.
#[derive(Clone, Debug)]
pub struct ProductRows {
    pub d: Vec<Row>,
    pub a: Vec<Row>,
}

fn product_rows(code: &[Instruction]) -> HashMap<u32, ProductRows> {
    let rows = code.iter().enumerate().filter_map(|(pc, instruction)| {
        let Op::Async(op) = &instruction.op else {
            return None;
        };
        let op::AsyncOp::Wgmma(wgmma) = &**op else {
            return None;
        };
        let a = match &wgmma.a {
            op::WgmmaA::Registers(rows) => rows.clone(),
            op::WgmmaA::Descriptor(_) => Vec::new(),
        };
        let d = wgmma.d.clone();
        Some((pc as u32, ProductRows { d, a }))
    });
    rows.collect()
}

/// Returns the registers of wgmma that each statement touches.
fn touches(
    entry: &EntryText,
    rows: &registers::Rows,
    products: &HashMap<u32, ProductRows>,
) -> Vec<Box<[(Row, bool)]>> {
    if products.is_empty() {
        return Vec::new();
    }
    let own: std::collections::HashSet<Row> = products
        .values()
        .flat_map(|product| product.d.iter().chain(&product.a))
        .copied()
        .collect();
    let list = entry.statements.iter().enumerate().map(|(pc, statement)| {
        // A wgmma may use accumulators of a product in flight (PTX ISA,
        // "wgmma.mma_async": same shape, in order). So its own registers do not
        // count as a touch.
        if products.contains_key(&(pc as u32)) {
            return Box::default();
        }
        let touched = registers::word_rows(statement, rows);
        touched
            .into_iter()
            .filter(|(row, _)| own.contains(row))
            .collect()
    });
    list.chain([Box::default()]).collect()
}

/// Returns true if an instruction may order blocks among each other.
fn synchronises(op: &Op) -> bool {
    use crate::text::Space;
    use op::{Fence, Order};
    match op {
        Op::Fence(fence) => *fence == Fence::Memory,
        Op::Load(access) | Op::Store(access) => {
            access.order != Order::Weak && access.space != Space::Shared
        }
        Op::Atomic(atomic) => atomic.order != Order::Relaxed && atomic.space != Space::Shared,
        _ => false,
    }
}

/// Returns true if results may depend on the order of blocks: atomics on global
/// memory that return a value or round, and loads that wait for others.
fn orders_blocks(op: &Op) -> bool {
    use crate::text::Space;
    use op::{AsyncOp, AtomicKind, AtomicType, Direction, Number, Order};
    let global = |space: Space| matches!(space, Space::Global | Space::Generic);
    match op {
        // An integer sum without a result is the same in any order. A float sum
        // rounds in the order of its terms, and a returned value is the order
        // itself. Such kernels run their blocks one by one, so that results do
        // not depend on the cores of the host.
        Op::Atomic(atomic) => {
            let whole = match atomic.ty {
                AtomicType::Number(ty) => {
                    !matches!(ty, Number::F16 | Number::Bf16 | Number::F32 | Number::F64)
                }
                AtomicType::Pair(_) => false,
            };
            let commutes = !matches!(atomic.kind, AtomicKind::Exchange | AtomicKind::CompareSwap);
            global(atomic.space) && !(atomic.results.is_empty() && whole && commutes)
        }
        Op::Load(access) => global(access.space) && access.order != Order::Weak,
        Op::Async(op) => match &**op {
            AsyncOp::Bulk(bulk) => {
                bulk.reduction.is_some() && bulk.direction == Direction::SharedToGlobal
            }
            AsyncOp::Tensor(copy) => copy.reduction.is_some(),
            _ => false,
        },
        _ => false,
    }
}

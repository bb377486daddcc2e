//! Decoded kernels: from parsed text to instructions that run.

pub mod decode;
pub mod layout;
pub mod op;
mod pool;
mod registers;

pub use pool::{Pool, RowValue};

use crate::error::PtxError;
use crate::text::{Class, ModuleText, Parameter, ParsedEntry};
use decode::Decoder;
use layout::Layout;
use op::{Instruction, PtxOp, RowIndex};
use std::collections::HashMap;

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
    pub words: RowIndex,
    pub word_sources: Vec<RowValue>,
    pub doubles: RowIndex,
    pub double_sources: Vec<RowValue>,
    pub predicates: RowIndex,
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
    pub touches: Vec<Box<[(RowIndex, bool)]>>,
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
        entry: &ParsedEntry,
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
    pub d: Vec<RowIndex>,
    pub a: Vec<RowIndex>,
}

fn product_rows(code: &[Instruction]) -> HashMap<u32, ProductRows> {
    let rows = code.iter().enumerate().filter_map(|(pc, instruction)| {
        let PtxOp::Async(op) = &instruction.op else {
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
    entry: &ParsedEntry,
    rows: &registers::RegisterRows,
    products: &HashMap<u32, ProductRows>,
) -> Vec<Box<[(RowIndex, bool)]>> {
    if products.is_empty() {
        return Vec::new();
    }
    let own: std::collections::HashSet<RowIndex> = products
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
fn synchronises(op: &PtxOp) -> bool {
    use crate::text::StateSpace;
    use op::{Fence, MemoryOrder};
    match op {
        PtxOp::Fence(fence) => *fence == Fence::Memory,
        PtxOp::Load(access) | PtxOp::Store(access) => {
            access.order != MemoryOrder::Weak && access.space != StateSpace::Shared
        }
        PtxOp::Atomic(atomic) => {
            atomic.order != MemoryOrder::Relaxed && atomic.space != StateSpace::Shared
        }
        _ => false,
    }
}

/// Returns true if results may depend on the order of blocks: atomics on global
/// memory that return a value or round, and loads that wait for others.
fn orders_blocks(op: &PtxOp) -> bool {
    use crate::text::StateSpace;
    use op::{AsyncOp, AtomicKind, AtomicType, Direction, MemoryOrder, Number};
    let global = |space: StateSpace| matches!(space, StateSpace::Global | StateSpace::Generic);
    match op {
        // An integer sum without a result is the same in any order. A float sum
        // rounds in the order of its terms, and a returned value is the order
        // itself. Such kernels run their blocks one by one, so that results do
        // not depend on the cores of the host.
        PtxOp::Atomic(atomic) => {
            let whole = match atomic.ty {
                AtomicType::Number(ty) => {
                    !matches!(ty, Number::F16 | Number::Bf16 | Number::F32 | Number::F64)
                }
                AtomicType::Pair(_) => false,
            };
            let commutes = !matches!(atomic.kind, AtomicKind::Exchange | AtomicKind::CompareSwap);
            global(atomic.space) && !(atomic.results.is_empty() && whole && commutes)
        }
        PtxOp::Load(access) => global(access.space) && access.order != MemoryOrder::Weak,
        PtxOp::Async(op) => match &**op {
            AsyncOp::Bulk(bulk) => {
                bulk.reduction.is_some() && bulk.direction == Direction::SharedToGlobal
            }
            AsyncOp::Tensor(copy) => copy.reduction.is_some(),
            _ => false,
        },
        _ => false,
    }
}

//! Parsed PTX: names are resolved, nothing is interpreted.

mod body;
mod cursor;
mod lexer;
mod location;
mod names;
mod operand;
mod parser;
mod variable;

pub use location::Locations;
pub use parser::parse;

use std::collections::HashMap;

/// The kinds of register rows a warp has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// A lane mask.
    Predicate,
    /// Up to 32 bits per lane.
    Word,
    /// 64 bits per lane.
    Double,
}

/// A register as the text declares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Virtual {
    pub class: Class,
    pub index: u32,
}

/// The state space of a variable or an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StateSpace {
    Generic,
    Global,
    Shared,
    Local,
    Param,
    Const,
}

/// A declared variable.
#[derive(Clone, Debug)]
pub struct Variable {
    pub name: String,
    pub space: StateSpace,
    pub align: u32,
    pub bytes: u32,
    /// Declared `.extern`: the launch gives the size.
    pub dynamic: bool,
    /// Initial contents of a global or constant variable.
    pub contents: Vec<u8>,
}

/// Special registers that are the same for a whole launch, block or warp, or
/// that differ per lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    LaneId,
    WarpId,
    LaneMask(Relation),
    ClusterCtaRank,
    ClusterCtaCount,
    ClusterCtaId(u8),
    ClusterCtaShape(u8),
    ClusterId(u8),
    ClusterCount(u8),
    SharedBytes,
    DynamicSharedBytes,
    SmId,
    SmCount,
    /// A counter that never goes back.
    Clock,
}

/// The lanes that a lane-mask register holds, relative to the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Relation {
    Below,
    AtMost,
    Equal,
    AtLeast,
    Above,
}

/// An operand with its names resolved.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    Register(Virtual),
    /// A negated predicate.
    Not(Virtual),
    /// The bits of a literal; floats by their hexadecimal form.
    Immediate(u64),
    Special(Special),
    /// The address of a variable: its index among the module's variables.
    Variable(usize),
    /// The offset of a kernel parameter.
    Parameter(u32),
    Vector(Vec<Operand>),
    /// `a|b`.
    Pair(Box<Operand>, Box<Operand>),
    /// `[base+offset]`, or `[base, {coordinates}]`.
    Memory {
        base: Box<Operand>,
        offset: i64,
        rest: Vec<Operand>,
    },
    /// The instruction that a label stands before.
    Label(usize),
    /// `_`.
    Sink,
}

/// An instruction before it is decoded.
#[derive(Clone, Debug)]
pub struct Statement {
    pub guard: Option<(Virtual, bool)>,
    /// The opcode, cut at its dots.
    pub opcode: Vec<String>,
    pub operands: Vec<Operand>,
    pub line: u32,
    /// Index into [`Locations`].
    pub place: u32,
}

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    pub offset: u32,
    pub bytes: u32,
}

/// A kernel as the text declares it.
#[derive(Clone, Debug, Default)]
pub struct ParsedEntry {
    pub name: String,
    pub line: u32,
    pub params: Vec<Parameter>,
    pub param_bytes: u32,
    /// `.maxntid` or `.reqntid`: the largest number of threads of a block.
    pub max_threads: Option<u32>,
    /// `.reqnctapercluster`.
    pub cluster: Option<u32>,
    pub statements: Vec<Statement>,
    /// Number of registers declared, per class.
    pub registers: HashMap<Class, u32>,
}

/// A parsed PTX module.
#[derive(Clone, Debug, Default)]
pub struct ModuleText {
    pub target: String,
    pub variables: Vec<Variable>,
    pub entries: Vec<ParsedEntry>,
    pub locations: Locations,
}

impl Statement {
    /// Returns the opcode in one piece.
    pub fn name(&self) -> String {
        self.opcode.join(".")
    }

    /// Returns true if the opcode has this part.
    pub fn has(&self, part: &str) -> bool {
        self.opcode.iter().any(|own| own == part)
    }

    /// Returns the part at `index`, empty beyond the end.
    pub fn part(&self, index: usize) -> &str {
        self.opcode.get(index).map_or("", String::as_str)
    }
}

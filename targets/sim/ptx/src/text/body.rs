//! Parses the body of a kernel: registers, labels, scopes, statements.

use super::cursor::Cursor;
use super::names::Names;
use super::operand::operand;
use super::variable::variable;
use super::{Class, ModuleText, Operand, ParsedEntry, Statement, Virtual};
use crate::error::PtxError;

type Result<T> = std::result::Result<T, PtxError>;

/// A use of a label, to be resolved at the end.
struct Use {
    statement: usize,
    operand: usize,
    name: String,
    scope: usize,
}

pub struct BodyParser<'p, 'a> {
    cursor: &'p mut Cursor<'a>,
    module: &'p mut ModuleText,
    entry: &'p mut ParsedEntry,
    names: Names,
    uses: Vec<Use>,
    last_label: String,
}

impl<'p, 'a> BodyParser<'p, 'a> {
    pub fn new(
        cursor: &'p mut Cursor<'a>,
        module: &'p mut ModuleText,
        entry: &'p mut ParsedEntry,
        params: Vec<(String, u32)>,
    ) -> BodyParser<'p, 'a> {
        let globals = module.variables.iter().enumerate();
        let variables = globals.map(|(i, variable)| (variable.name.clone(), i));
        let names = Names::new(params, variables);
        BodyParser {
            cursor,
            module,
            entry,
            names,
            uses: Vec::new(),
            last_label: String::new(),
        }
    }

    /// Parses the body from its `{` to its `}`.
    pub fn parse(mut self) -> Result<()> {
        self.cursor.expect("{")?;
        let mut depth = 1;
        while depth > 0 {
            match self.cursor.peek_text() {
                "{" => {
                    self.cursor.next()?;
                    self.names.open();
                    depth += 1;
                }
                "}" => {
                    self.cursor.next()?;
                    self.names.close();
                    depth -= 1;
                }
                ";" => self.cursor.next().map(|_| ())?,
                text if text.starts_with('.') => self.directive()?,
                _ if self.cursor.second_text() == ":" => self.label()?,
                _ => self.statement()?,
            }
        }
        self.resolve()
    }

    fn label(&mut self) -> Result<()> {
        let name = self.cursor.next()?;
        self.cursor.expect(":")?;
        let at = self.entry.statements.len();
        let scope = self.names.scope();
        scope.labels.insert(name.text.to_string(), at);
        self.last_label = name.text.to_string();
        Ok(())
    }

    fn directive(&mut self) -> Result<()> {
        match self.cursor.peek_text() {
            ".reg" => self.registers(),
            ".loc" => self.loc(),
            ".shared" | ".local" | ".global" | ".const" => self.variable(),
            ".branchtargets" => self.table(),
            ".pragma" => {
                self.cursor.skip_statement();
                Ok(())
            }
            other => Err(PtxError::syntax(
                self.cursor.line(),
                format!("`{other}` is not understood inside a kernel"),
            )),
        }
    }

    fn registers(&mut self) -> Result<()> {
        self.cursor.next()?;
        let ty = self.cursor.next()?;
        let class = match ty.text {
            ".pred" => Class::Predicate,
            ".b64" | ".u64" | ".s64" | ".f64" => Class::Double,
            ".b128" => {
                let what = "128-bit registers are not covered by the simulator";
                return Err(PtxError::syntax(ty.line, what));
            }
            _ => Class::Word,
        };
        loop {
            let name = self.cursor.next()?.text.to_string();
            let next = self.entry.registers.entry(class).or_insert(0);
            let first = Virtual {
                class,
                index: *next,
            };
            let scope = self.names.scope();
            if self.cursor.take("<") {
                let count = self.cursor.integer()? as u32;
                self.cursor.expect(">")?;
                *next += count;
                scope.families.push((name, first, count));
            } else {
                *next += 1;
                scope.registers.insert(name, first);
            }
            if self.cursor.take(";") {
                return Ok(());
            }
            self.cursor.expect(",")?;
        }
    }

    /// Parses `.loc file line column [, function_name name, inlined_at file
    /// line column]`.
    fn loc(&mut self) -> Result<()> {
        self.cursor.next()?;
        let mut numbers = [0; 3];
        for number in &mut numbers {
            *number = self.cursor.integer()? as u32;
        }
        let mut caller = None;
        while self.cursor.take(",") {
            let word = self.cursor.next()?;
            if word.text == "inlined_at" {
                self.cursor.integer()?;
                caller = Some((self.cursor.integer()? as u32, self.cursor.integer()? as u32));
            } else {
                self.cursor.next()?;
                if self.cursor.take("+") {
                    self.cursor.next()?;
                }
            }
        }
        let locations = &mut self.module.locations;
        locations.enter((numbers[1], numbers[2]), caller);
        Ok(())
    }

    fn variable(&mut self) -> Result<()> {
        let variable = variable(self.cursor)?;
        let at = self.module.variables.len();
        let scope = self.names.scope();
        scope.variables.insert(variable.name.clone(), at);
        self.module.variables.push(variable);
        Ok(())
    }

    /// Parses the targets of an indexed branch, named by the label before them.
    fn table(&mut self) -> Result<()> {
        self.cursor.next()?;
        let mut targets = Vec::new();
        while !self.cursor.take(";") {
            targets.push(self.cursor.next()?.text.to_string());
            self.cursor.take(",");
        }
        let name = std::mem::take(&mut self.last_label);
        self.names.scope().tables.insert(name, targets);
        Ok(())
    }

    fn statement(&mut self) -> Result<()> {
        let line = self.cursor.line();
        let guard = self.guard()?;
        let opcode: Vec<String> = self
            .cursor
            .next()?
            .text
            .split('.')
            .map(str::to_string)
            .collect();
        let mut operands = Vec::new();
        while !self.cursor.take(";") {
            let branch = opcode[0] == "bra" || (opcode[0] == "brx" && !operands.is_empty());
            operands.push(if branch {
                self.label_use(operands.len())?
            } else {
                operand(self.cursor, &self.names)?
            });
            if !self.cursor.take(",") && self.cursor.peek_text() != ";" {
                let found = self.cursor.peek_text();
                let what = format!("`{found}` where `,` or `;` should be");
                return Err(PtxError::syntax(self.cursor.line(), what));
            }
        }
        self.entry.statements.push(Statement {
            guard,
            opcode,
            operands,
            line,
            place: self.module.locations.current(),
        });
        Ok(())
    }

    fn guard(&mut self) -> Result<Option<(Virtual, bool)>> {
        if !self.cursor.take("@") {
            return Ok(None);
        }
        let negate = self.cursor.take("!");
        let name = self.cursor.next()?;
        match self.names.register(name.text) {
            Some(register) if register.class == Class::Predicate => Ok(Some((register, negate))),
            _ => Err(PtxError::syntax(
                name.line,
                format!("`{}` is no predicate", name.text),
            )),
        }
    }

    fn label_use(&mut self, operand: usize) -> Result<Operand> {
        let name = self.cursor.next()?.text.to_string();
        self.uses.push(Use {
            statement: self.entry.statements.len(),
            operand,
            name,
            scope: self.names.current(),
        });
        Ok(Operand::Label(usize::MAX))
    }

    /// Resolves labels to their statements. The layout counts the bytes of
    /// `.local` variables.
    fn resolve(self) -> Result<()> {
        for used in &self.uses {
            let find = |name: &str| {
                self.names
                    .enclosing(used.scope, |scope| scope.labels.get(name).copied())
                    .map(Operand::Label)
            };
            let table = self
                .names
                .enclosing(used.scope, |scope| scope.tables.get(&used.name).cloned());
            let target = match table {
                Some(names) => names
                    .iter()
                    .map(|name| find(name))
                    .collect::<Option<Vec<_>>>()
                    .map(Operand::Vector),
                None => find(&used.name),
            };
            let statement = &mut self.entry.statements[used.statement];
            statement.operands[used.operand] = target.ok_or_else(|| {
                PtxError::syntax(statement.line, format!("no label `{}`", used.name))
            })?;
        }
        Ok(())
    }
}

//! `wgmma`: products of a warpgroup that complete in the background.

use super::ClusterRunner;
use super::state::products::Product;
use super::state::sync::Component;
use super::warp::{Flow, IssuedProduct, Wait, Warp, Words, lanes_of};
use crate::code::op::{AsyncOp, PtxOp, RowIndex, WgmmaA, WgmmaOp};
use crate::finding::{Fault, FaultPlace, FindingKind, Step};
use moesaic_hardware::wgmma::{Descriptor, Major, SharedMemory, SourceA, Wgmma as Unit};
use std::rc::Rc;

impl ClusterRunner<'_> {
    fn group_of(&self, number: usize) -> (usize, usize) {
        // A warpgroup is four warps that start at a multiple of four within the
        // block (PTX ISA, "wgmma: Warpgroup"), so groups never span two blocks
        // of a cluster.
        let warps = self.blocks[0].warps.len();
        let (rank, local) = (number / warps, number % warps);
        (rank * warps.div_ceil(4) + local / 4, local % 4)
    }

    pub fn wgmma(&mut self, warp: &mut Warp, op: &WgmmaOp, mask: u32) -> Step<Flow> {
        if let Some(flow) = self.whole_warp(warp, mask) {
            return Ok(flow);
        }
        let (group, place) = self.group_of(warp.number as usize);
        let product = self.product(warp, op, mask)?;
        self.check_registers(warp, op, mask)?;
        let own = &mut self.products[group];
        // Warps may run ahead of each other; the position in the queue pairs
        // the n-th product of each. They must be the same instruction, because
        // all four execute it together.
        let at = (own.issued[place] - own.executed) as usize;
        own.issued[place] += 1;
        let step = own.issued[place];
        match own.queue.get_mut(at) {
            None => own.queue.push_back(product),
            Some(known) => {
                let same = known.pc == product.pc
                    && (known.a, known.b, known.accumulate)
                        == (product.a, product.b, product.accumulate);
                if !same {
                    let text = "the warps of a warpgroup issue different products";
                    return Err(Fault::new(FindingKind::Operand, mask, text));
                }
                known.issued |= product.issued;
            }
        }
        self.changes += 1;
        // The operands must be ready at the issue already. The product may read
        // shared memory at any time from now on.
        self.check_operands(warp, op, step)?;
        warp.flying.push_back(IssuedProduct { step, pc: self.pc });
        self.tally.multiply_adds += (16 * op.kind.n() * op.kind.k()) as u64;
        Ok(Flow::Next)
    }

    /// Returns the operands of a product, on which all lanes must agree.
    fn product(&self, warp: &Warp, op: &WgmmaOp, mask: u32) -> Step<Product> {
        let same = |row: RowIndex| {
            let values = warp.double(row);
            if lanes_of(mask).all(|lane| values[lane] == values[0]) {
                Ok(values[0])
            } else {
                let text = "the lanes of a warp give wgmma different descriptors";
                Err(Fault::new(FindingKind::Operand, mask, text))
            }
        };
        let scale = warp.predicate(op.scale_d, false);
        if scale != 0 && scale != u32::MAX {
            let text = "the lanes of a warp give wgmma different scale-d predicates";
            return Err(Fault::new(FindingKind::Operand, mask, text));
        }
        let (_, place) = self.group_of(warp.number as usize);
        Ok(Product {
            pc: self.pc,
            a: match op.a {
                WgmmaA::Descriptor(row) => same(row)?,
                WgmmaA::Registers(_) => 0,
            },
            b: same(op.b)?,
            accumulate: scale != 0,
            issued: 1 << place,
        })
    }

    /// Checks that `wgmma.fence` has run since ordinary instructions wrote the
    /// registers.
    fn check_registers(&self, warp: &Warp, op: &WgmmaOp, mask: u32) -> Step<()> {
        let a: &[RowIndex] = match &op.a {
            WgmmaA::Registers(rows) => rows,
            WgmmaA::Descriptor(_) => &[],
        };
        // The rule spares accumulators that only wgmma of the same shape has
        // written (PTX ISA, "wgmma.fence"). `unfenced` lists writes by other
        // instructions alone.
        let dirty = |row: &RowIndex| warp.unfenced.contains(row);
        if !warp.fenced || op.d.iter().chain(a).any(dirty) {
            let text = "wgmma uses registers that were written since the last wgmma.fence";
            return Err(Fault::new(FindingKind::AccumulatorInFlight, mask, text));
        }
        Ok(())
    }

    /// Checks the shared memory that a product reads: a quarter of the chunks
    /// per warp.
    fn check_operands(&mut self, warp: &Warp, op: &WgmmaOp, step: u32) -> Step<()> {
        if !self.launch.full {
            return Ok(());
        }
        let (group, place) = self.group_of(warp.number as usize);
        let component = self.component(Component::Products { group });
        let chunks = self.chunks(warp, op);
        let block = warp.block as usize;
        // All four warps issue the product, and each has its own knowledge. A
        // quarter each covers all chunks once, and every warp must have
        // synchronised with the writer.
        for &offset in chunks.chunks(4).skip(place).step_by(4).flatten() {
            let offset = offset as usize;
            self.shared_at("multiplies", warp.block, offset as u64, 16, 0)?;
            let shadow = &mut self.blocks[block].shadow;
            if let Err(clash) = shadow.check_engine_read(&warp.known[0], offset, 16) {
                return Err(self.clash(warp, 0xffff_ffff, ("multiplies", offset, 16), clash));
            }
            shadow.engine_reads(component, step, offset);
        }
        Ok(())
    }

    /// Returns every 16 bytes of shared memory that a product reads. The result
    /// is cached, because kernels use the same few descriptors over and over.
    fn chunks(&mut self, warp: &Warp, op: &WgmmaOp) -> Rc<[u32]> {
        let (a, b) = self.descriptors(warp, op);
        if let Some(known) = self.chunks.get(&(self.pc, a, b)) {
            return Rc::clone(known);
        }
        let unit = unit(op, (a, b), SourceA::Registers(&[[0; 32]; 16]));
        let mut list = Vec::new();
        if let Some(operand) = unit.operand_a() {
            operand.chunks(64, |address| list.push(address));
        }
        unit.operand_b()
            .chunks(op.kind.n(), |address| list.push(address));
        let list: Rc<[u32]> = list.into();
        self.chunks.insert((self.pc, a, b), Rc::clone(&list));
        list
    }

    fn descriptors(&self, warp: &Warp, op: &WgmmaOp) -> (u64, u64) {
        let a = match op.a {
            WgmmaA::Descriptor(row) => warp.double(row)[0],
            WgmmaA::Registers(_) => 0,
        };
        (a, warp.double(op.b)[0])
    }

    pub fn wgmma_fence(&mut self, warp: &mut Warp, mask: u32) -> Step<Flow> {
        if let Some(flow) = self.whole_warp(warp, mask) {
            return Ok(flow);
        }
        warp.fenced = true;
        warp.unfenced.clear();
        Ok(Flow::Next)
    }

    pub fn wgmma_commit(&mut self, warp: &mut Warp, mask: u32) -> Step<Flow> {
        if let Some(flow) = self.whole_warp(warp, mask) {
            return Ok(flow);
        }
        let (group, place) = self.group_of(warp.number as usize);
        let own = &mut self.products[group];
        let issued = own.issued[place];
        own.commits[place].push_back(issued);
        Ok(Flow::Next)
    }

    pub fn wgmma_wait(&mut self, warp: &mut Warp, left: u32, mask: u32) -> Step<Flow> {
        if let Some(flow) = self.whole_warp(warp, mask) {
            return Ok(flow);
        }
        if !self.products_done(warp.number as usize, left) {
            return Ok(Flow::Again(Wait::Products(left)));
        }
        let (group, place) = self.group_of(warp.number as usize);
        let commits = &mut self.products[group].commits[place];
        let mut over = 0;
        while commits.len() > left as usize {
            over = commits.pop_front().unwrap_or(over);
        }
        if over == 0 {
            return Ok(Flow::Next);
        }
        while warp.flying.front().is_some_and(|own| own.step <= over) {
            warp.flying.pop_front();
        }
        let component = self.component(Component::Products { group });
        // The wait is a fact about the warpgroup's products, so it goes into
        // the clock of each lane and travels on with the next barrier: a
        // producer may refill the buffer once it has met this warp there.
        for lane in 0..32 {
            Rc::make_mut(&mut warp.known[lane].seen).add_engine(component, over);
        }
        Ok(Flow::Next)
    }

    /// Returns true if all groups of a warp except the last `left` were
    /// executed.
    pub fn products_done(&self, number: usize, left: u32) -> bool {
        let (group, place) = self.group_of(number);
        let own = &self.products[group];
        let commits = &own.commits[place];
        let due = commits.len().saturating_sub(left as usize);
        commits.iter().take(due).all(|end| *end <= own.executed)
    }

    /// Executes products that all four warps have issued: some early, as the
    /// seed says, and all of them when threads wait.
    pub fn run_products(&mut self, force: bool) -> Step<bool> {
        let mut done = false;
        for group in 0..self.products.len() {
            loop {
                let ready = self.products[group]
                    .queue
                    .front()
                    .is_some_and(|own| own.issued == 15);
                let now = force || (self.launch.seed != 0 && self.random.below(4) == 0);
                if !ready || !now {
                    break;
                }
                self.multiply(group)?;
                done = true;
            }
        }
        Ok(done)
    }

    fn multiply(&mut self, group: usize) -> Step<()> {
        // The product executes with the registers and shared memory of this
        // moment, not of its issue. A kernel that overwrites either too early
        // gets wrong numbers as well as the finding.
        let own = &mut self.products[group];
        own.executed += 1;
        let Some(product) = own.queue.pop_front() else {
            return Ok(());
        };
        self.changes += 1;
        let kernel = self.kernel;
        let PtxOp::Async(instruction) = &kernel.code[product.pc as usize].op else {
            return Ok(());
        };
        let AsyncOp::Wgmma(op) = &**instruction else {
            return Ok(());
        };
        let first = self.first_warp(group);
        let mut d: Vec<Words> = Vec::with_capacity(4 * op.d.len());
        let mut a: [Words; 16] = [[0; 32]; 16];
        for (place, warp) in self.warps[first..first + 4].iter().enumerate() {
            d.extend(op.d.iter().map(|row| *warp.word(*row)));
            if let WgmmaA::Registers(rows) = &op.a {
                for (at, row) in rows.iter().enumerate() {
                    a[4 * place + at] = *warp.word(*row);
                }
            }
        }
        let mut unit = unit(op, (product.a, product.b), SourceA::Registers(&a));
        unit.accumulate = product.accumulate;
        let block = self.warps[first].block as usize;
        let shared = SharedMemory {
            base: 0,
            bytes: &self.blocks[block].shared,
        };
        if let Err(error) = unit.execute(shared, &mut d) {
            let mut fault = Fault::new(FindingKind::Operand, 0, error.to_string());
            fault.at = Some(FaultPlace {
                pc: product.pc,
                block: block as u32,
                threads: self.warps[first].threads(u32::MAX),
            });
            return Err(fault);
        }
        let values = d.chunks_exact(op.d.len());
        for (warp, values) in self.warps[first..first + 4].iter_mut().zip(values) {
            for (row, value) in op.d.iter().zip(values) {
                // All lanes are written, whatever the mask: `watch` has kept
                // every other instruction away from these registers.
                warp.put(*row, value, u32::MAX);
            }
        }
        Ok(())
    }

    fn first_warp(&self, group: usize) -> usize {
        let per_block = self.blocks[0].warps.len().div_ceil(4);
        self.blocks[group / per_block].warps.start + group % per_block * 4
    }

    /// Checks an instruction against the products in flight, whose registers no
    /// instruction may touch.
    #[inline(never)]
    pub fn watch(&self, warp: &mut Warp, pc: usize, mask: u32) -> Step<()> {
        let touches = &self.kernel.touches[pc];
        if mask == 0 || touches.is_empty() {
            return Ok(());
        }
        for &(row, writes) in touches.iter() {
            let clash = warp.flying.iter().find(|own| {
                let uses = &self.kernel.products[&own.pc];
                // Reading A's registers is allowed while a product reads them
                // too; writing them is not. D may be neither read nor written
                // (PTX ISA, "wgmma.mma_async": accessing registers before
                // wait_group is undefined).
                uses.d.contains(&row) || (writes && uses.a.contains(&row))
            });
            if let Some(product) = clash {
                let verb = if writes { "writes" } else { "reads" };
                let text = format!("{verb} a register of a wgmma that has not been waited for");
                let mut fault = Fault::new(FindingKind::AccumulatorInFlight, mask, text);
                fault.other = Some(product.pc);
                fault.at = Some(FaultPlace {
                    pc: pc as u32,
                    block: warp.block,
                    threads: warp.threads(mask),
                });
                return Err(fault);
            }
            // Every write is remembered, also with no product in flight: the
            // next wgmma needs a fence after it.
            if writes && !warp.unfenced.contains(&row) {
                warp.unfenced.push(row);
            }
        }
        Ok(())
    }
}

fn unit<'a>(op: &WgmmaOp, (a, b): (u64, u64), registers: SourceA<'a>) -> Unit<'a> {
    let major = |transposed: bool| if transposed { Major::Mn } else { Major::K };
    Unit {
        kind: op.kind,
        a: match op.a {
            WgmmaA::Descriptor(_) => SourceA::Shared(Descriptor::decode(a), major(op.transpose_a)),
            WgmmaA::Registers(_) => registers,
        },
        b: Descriptor::decode(b),
        b_major: major(op.transpose_b),
        accumulate: true,
        negate_a: op.negate_a,
        negate_b: op.negate_b,
    }
}

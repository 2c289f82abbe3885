//! A minimal driver. Its offsets are counted by hand from Linux's `mlx5_ifc.h` and
//! not shared with the engine. Failures panic.

use std::cell::{Cell, RefCell};

use roce::fabric::Fabric;
use roce::packet::Pool;

use crate::hca::{Hca, Settings};
use crate::link_shape::LinkShape;
use crate::platform::{Clock, Interrupts, Memory, Peers, Unmapped};
use crate::profile::Profile;

/// A platform in this process: memory, clock and interrupts.
pub struct TestPlatform {
    memory: RefCell<Vec<u8>>,
    /// The time in nanoseconds; every read of the clock advances it.
    pub now: Cell<u64>,
    /// The vectors raised so far.
    pub interrupts: RefCell<Vec<u16>>,
}

const MEMORY_SIZE: usize = 1 << 20;

impl TestPlatform {
    fn range(&self, address: u64, length: usize) -> Result<std::ops::Range<usize>, Unmapped> {
        let from = usize::try_from(address).map_err(|_| Unmapped { address })?;
        let to = from.checked_add(length).filter(|to| *to <= MEMORY_SIZE);
        Ok(from..to.ok_or(Unmapped { address })?)
    }
}

impl Memory for TestPlatform {
    fn read(&self, address: u64, out: &mut [u8]) -> Result<(), Unmapped> {
        out.copy_from_slice(&self.memory.borrow()[self.range(address, out.len())?]);
        Ok(())
    }
    fn write(&self, address: u64, data: &[u8]) -> Result<(), Unmapped> {
        let range = self.range(address, data.len())?;
        self.memory.borrow_mut()[range].copy_from_slice(data);
        Ok(())
    }
    fn copies_from(&self, address: u64, length: usize) -> bool {
        self.range(address, length).is_ok()
    }
    fn publish(&self, address: u64, byte: u8) -> Result<(), Unmapped> {
        self.write(address, &[byte])
    }
    fn read_index(&self, address: u64) -> Result<u32, Unmapped> {
        let mut bytes = [0; 4];
        self.read(address, &mut bytes)?;
        Ok(u32::from_be_bytes(bytes))
    }
}

impl Interrupts for TestPlatform {
    fn interrupt(&mut self, vector: u16) {
        self.interrupts.borrow_mut().push(vector);
    }
}

impl Peers for TestPlatform {}

impl Clock for TestPlatform {
    fn now(&self) -> u64 {
        self.now.set(self.now.get() + 100);
        self.now.get()
    }
}

/// A command input under construction.
#[derive(Clone)]
pub struct Input(pub Vec<u8>);

impl Input {
    /// Creates an input of zeros with an opcode.
    pub fn new(opcode: u16, length: usize) -> Input {
        let mut bytes = vec![0; length];
        bytes[..2].copy_from_slice(&opcode.to_be_bytes());
        Input(bytes)
    }
    /// ORs `value << shift` into the word at a byte offset.
    pub fn or(mut self, offset: usize, shift: u32, value: u32) -> Input {
        let word = word(&self.0, offset) | value << shift;
        self.0[offset..offset + 4].copy_from_slice(&word.to_be_bytes());
        self
    }
    /// Replaces the 64-bit word at a byte offset.
    pub fn put64(mut self, offset: usize, value: u64) -> Input {
        self.0[offset..offset + 8].copy_from_slice(&value.to_be_bytes());
        self
    }
}

/// Reads the big-endian word at a byte offset.
pub fn word(bytes: &[u8], offset: usize) -> u32 {
    u32::from_be_bytes(bytes[offset..offset + 4].try_into().unwrap())
}

/// A completion queue from the program's side.
pub struct Cq {
    /// The CQ number.
    pub number: u32,
    /// The address of its entries.
    pub buffer: u64,
    /// The address of its doorbell record.
    pub doorbell: u64,
    /// Base-2 logarithm of the number of entries.
    pub log_size: u32,
    /// The number of completions polled.
    pub index: u32,
    /// Whether entries have 128 bytes.
    pub wide: bool,
}

impl Cq {
    /// The address of the 64 bytes of an entry that hold its fields.
    pub fn entry(&self, index: u32) -> u64 {
        let slot = u64::from(index & ((1 << self.log_size) - 1));
        match self.wide {
            true => self.buffer + slot * 128 + 64,
            false => self.buffer + slot * 64,
        }
    }

    /// The owner bit of entry `index` when it is new to software.
    pub fn owner(&self, index: u32) -> u8 {
        (index >> self.log_size & 1) as u8
    }
}

/// A queue pair from the program's side.
pub struct Qp {
    /// The QP number.
    pub number: u32,
    /// The address of the receive ring.
    pub recv: u64,
    /// The address of the send ring.
    pub send: u64,
    /// The address of its doorbell record.
    pub doorbell: u64,
    /// The number of 64-byte blocks posted to the send queue.
    pub posted: u16,
    /// The number of receives posted.
    pub received: u16,
}

/// WQE flag: the request generates a completion.
pub const SIGNALED: u8 = 8;
/// WQE flag: the completion at the peer is a solicited event.
pub const SOLICITED: u8 = 2;

/// Base-2 logarithm of the receive queue size, in entries of 64 bytes.
pub const RECV_LOG: u32 = 4;
/// Base-2 logarithm of the send queue size, in blocks of 64 bytes.
pub const SEND_LOG: u32 = 4;

/// An HCA and its driver.
pub struct Driver {
    /// The HCA.
    pub hca: Hca<TestPlatform>,
    next_page: u64,
    /// The UAR page of all doorbells.
    pub uar: u32,
    /// The event queue.
    pub eqn: u32,
    /// The address of its entries.
    pub eq: u64,
    /// The protection domain of all objects.
    pub pd: u32,
    /// A key for all memory, with virtual addresses equal to physical ones.
    pub key: u32,
}

impl Driver {
    /// Creates an HCA that is alone on its network.
    pub fn new(profile: &str) -> Driver {
        Driver::with(profile, 0, &Fabric::new(1), false)
    }

    /// Creates the `number`th HCA of a network.
    pub fn with(profile: &str, number: u16, fabric: &Fabric, strict: bool) -> Driver {
        let settings = Settings::numbered(Profile::named(profile).unwrap(), number);
        Driver::of(Settings { strict, ..settings }, fabric)
    }

    /// Creates an HCA whose link has properties.
    pub fn shaped(profile: &str, number: u16, fabric: &Fabric, link: LinkShape) -> Driver {
        let settings = Settings::numbered(Profile::named(profile).unwrap(), number);
        Driver::of(Settings { link, ..settings }, fabric)
    }

    fn of(settings: Settings, fabric: &Fabric) -> Driver {
        let platform = TestPlatform {
            memory: RefCell::new(vec![0; MEMORY_SIZE]),
            now: Cell::new(1),
            interrupts: RefCell::default(),
        };
        let hca = Hca::new(platform, settings, fabric, Pool::new());
        #[cfg(test)]
        let hca = {
            let mut hca = hca;
            hca.observe(Some(crate::tests::causes::recorder()));
            hca
        };
        let mut driver = Driver {
            hca,
            next_page: 0x4_0000,
            uar: 0,
            eqn: 0,
            eq: 0,
            pd: 0,
            key: 0,
        };
        driver.uar = driver.create(Input::new(0x802, 16));
        driver.pd = driver.create(Input::new(0x800, 16));
        driver.eq = driver.pages(1);
        let uar = driver.uar;
        let create = Input::new(0x301, 0x118)
            .or(0x1c, 24, 6)
            .or(0x1c, 0, uar)
            .or(0x24, 0, 1)
            // All event types.
            .put64(0x58, u64::MAX >> 1 << 1)
            .put64(0x110, driver.eq);
        driver.eqn = driver.create(create);
        // Shifts the CQ numbers, so that objects of different kinds do not share a
        // number by chance.
        for _ in 0..3 {
            driver.create_cq(2);
        }
        driver.key = driver.create_key(0, 0, 1 << 31, 0x1f);
        driver
    }

    /// Allocates contiguous zeroed pages.
    pub fn pages(&mut self, count: u64) -> u64 {
        let at = self.next_page;
        self.next_page += count * 4096;
        at
    }

    /// Executes a command. Returns the status and the whole output.
    pub fn command(&mut self, input: &Input, output: usize) -> (u8, Vec<u8>) {
        let output = self.hca.execute(&input.0, output);
        (output[0], output)
    }

    /// Executes a command that must succeed. Returns the output.
    pub fn execute(&mut self, input: &Input, output: usize) -> Vec<u8> {
        let (status, output) = self.command(input, output);
        assert_eq!(status, 0, "{:?}", &input.0[..16]);
        output
    }

    /// Executes a command that creates an object. Returns its number.
    pub fn create(&mut self, input: Input) -> u32 {
        word(&self.execute(&input, 16), 8) & 0xff_ffff
    }

    /// Creates a key for physical memory. `flags` go to the word at 0x1c; `rights`
    /// are bits from local read upwards.
    pub fn create_key(&mut self, start: u64, length: u64, flags: u32, rights: u32) -> u32 {
        let pd = self.pd;
        let create = Input::new(0x200, 0x110)
            .or(0x10, 10, rights)
            .or(0x14, 8, 0xff_ffff)
            .or(0x14, 0, 0x42)
            .or(0x1c, 0, pd | flags)
            .put64(0x20, start)
            .put64(0x28, length);
        self.create(create) << 8 | 0x42
    }

    /// Creates a key for pages, with capacity for exactly these entries.
    pub fn create_paged_key(&mut self, start: u64, length: u64, pages: &[u64]) -> u32 {
        let pd = self.pd;
        let units = (pages.len() as u32).div_ceil(2);
        let mut create = Input::new(0x200, 0x110 + units as usize * 16)
            .or(0x10, 8, 1)
            .or(0x10, 10, 0x1f)
            .or(0x14, 8, 0xff_ffff)
            .or(0x14, 0, 0x17)
            .or(0x1c, 0, pd)
            .put64(0x20, start)
            .put64(0x28, length)
            .or(0x44, 0, units)
            .or(0x48, 0, 12)
            .or(0x60, 0, units);
        for (n, page) in pages.iter().enumerate() {
            // Readable and writable, hence present.
            create = create.put64(0x110 + n * 8, page | 3);
        }
        self.create(create) << 8 | 0x17
    }

    /// Creates a completion queue with entries of 64 bytes.
    pub fn create_cq(&mut self, log_size: u32) -> Cq {
        self.create_cq_with(log_size, false, |input| input)
    }

    /// Creates a shared receive queue with four entries of 32 bytes.
    pub fn create_srq(&mut self, buffer: u64, doorbell: u64) -> u32 {
        let pd = self.pd;
        let create = Input::new(0x90c, 0x118)
            .or(0x20, 20, 1)
            .or(0x58, 0, pd)
            .put64(0x60, doorbell)
            .or(0x70, 16, 5)
            .or(0x70, 0, 2)
            .put64(0x110, buffer);
        self.create(create)
    }

    /// Creates a completion queue; `fill` modifies the command first.
    pub fn create_cq_with(
        &mut self,
        log_size: u32,
        wide: bool,
        fill: impl FnOnce(Input) -> Input,
    ) -> Cq {
        let buffer = self.pages(2);
        let doorbell = self.pages(1);
        let (uar, eqn) = (self.uar, self.eqn);
        let create = Input::new(0x400, 0x120)
            .or(0x10, 21, u32::from(wide))
            .or(0x1c, 24, log_size)
            .or(0x1c, 0, uar)
            .or(0x24, 0, eqn)
            .put64(0x48, doorbell)
            .put64(0x110, buffer)
            .put64(0x118, buffer + 4096);
        let mut cq = Cq {
            number: 0,
            buffer,
            doorbell,
            log_size,
            index: 0,
            wide,
        };
        for n in 0..1_u32 << log_size {
            self.write(cq.entry(n) + 63, &[0xf1]);
        }
        cq.number = self.create(fill(create));
        cq
    }

    /// Creates a queue pair of a service type, with receives of 64 bytes.
    pub fn create_qp(&mut self, st: u32, cq: &Cq, srqn: Option<u32>) -> Qp {
        self.create_qp_with(st, cq, srqn, |input| input)
    }

    /// Like `create_qp`; `fill` modifies the command first.
    pub fn create_qp_with(
        &mut self,
        st: u32,
        cq: &Cq,
        srqn: Option<u32>,
        fill: impl FnOnce(Input) -> Input,
    ) -> Qp {
        let buffer = self.pages(1);
        let doorbell = self.pages(1);
        let (uar, pd) = (self.uar, self.pd);
        let mut create = Input::new(0x500, 0x118)
            .or(0x18, 16, st)
            .or(0x1c, 0, pd)
            .or(0x20, 11, SEND_LOG)
            .or(0x24, 0, uar)
            .or(0x28, 0, 7)
            .or(0x94, 0, cq.number)
            .or(0xb4, 0, cq.number)
            .put64(0xb8, doorbell)
            .put64(0x110, buffer);
        create = match srqn {
            Some(srqn) => create.or(0xc4, 24, 1).or(0xc4, 0, srqn),
            None => create.or(0x20, 19, RECV_LOG).or(0x20, 16, 2),
        };
        Qp {
            number: self.create(fill(create)),
            recv: buffer,
            send: buffer + if srqn.is_some() { 0 } else { 64 << RECV_LOG },
            doorbell,
            posted: 0,
            received: 0,
        }
    }

    /// Creates two connected queue pairs of this HCA and their completion queue.
    pub fn pair(&mut self) -> (Cq, Qp, Qp) {
        let cq = self.create_cq(4);
        let (a, b) = self.pair_on(&cq);
        (cq, a, b)
    }

    /// Creates two connected queue pairs of this HCA.
    pub fn pair_on(&mut self, cq: &Cq) -> (Qp, Qp) {
        let a = self.create_qp(0, cq, None);
        let b = self.create_qp(0, cq, None);
        self.connect(a.number, b.number, 1);
        self.connect(b.number, a.number, 1);
        (a, b)
    }

    /// Changes the state of a queue pair.
    pub fn modify(&mut self, opcode: u16, qp: u32, fill: impl FnOnce(Input) -> Input) {
        let input = fill(Input::new(opcode, 0x110).or(8, 0, qp));
        self.execute(&input, 16);
    }

    /// Connects a queue pair to another one, on the HCA with this LID.
    pub fn connect(&mut self, qp: u32, remote: u32, lid: u16) {
        self.modify(0x502, qp, |input| input.or(0xa8, 13, 7));
        self.modify(0x503, qp, |input| {
            input
                .or(0x20, 29, 3)
                .or(0x2c, 0, remote)
                .or(0x34, 0, u32::from(lid))
                .or(0xa8, 21, 4)
                .or(0xac, 0, 100)
                .or(0xac, 24, 12)
        });
        self.modify(0x504, qp, |input| {
            input
                .or(0x38, 27, 14)
                .or(0x88, 21, 4)
                .or(0x88, 16, 7)
                .or(0x88, 13, 7)
                .or(0x90, 0, 100)
        });
    }

    /// Writes to memory.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.hca.platform().write(address, bytes).unwrap();
    }

    /// Reads memory.
    pub fn read(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.hca.platform().read(address, &mut bytes).unwrap();
        bytes
    }

    /// Writes a WQE into the send ring and updates the doorbell record, without
    /// ringing the doorbell. Returns the WQE.
    pub fn write_wqe(&self, qp: &mut Qp, opcode: u8, flags: u8, segments: &[u8]) -> Vec<u8> {
        let count = 1 + segments.len().div_ceil(16);
        let mut entry = vec![0; count * 16];
        entry[..4].copy_from_slice(&(u32::from(qp.posted) << 8 | u32::from(opcode)).to_be_bytes());
        entry[4..8].copy_from_slice(&(qp.number << 8 | count as u32).to_be_bytes());
        entry[11] = flags;
        entry[16..16 + segments.len()].copy_from_slice(segments);
        for (n, block) in entry.chunks(64).enumerate() {
            let slot = u64::from(qp.posted.wrapping_add(n as u16)) & ((1 << SEND_LOG) - 1);
            self.write(qp.send + slot * 64, block);
        }
        qp.posted = qp.posted.wrapping_add(entry.len().div_ceil(64) as u16);
        self.write(qp.doorbell + 4, &u32::from(qp.posted).to_be_bytes());
        entry
    }

    /// Rings the doorbell for a WQE and runs the HCA.
    pub fn ring(&mut self, entry: &[u8]) {
        let at = u64::from(self.uar) * 4096 + 0x800;
        self.hca.write(at, &entry[..8]);
        self.hca.flush_blue_flame();
        self.run();
    }

    /// Posts a send request and rings the doorbell.
    pub fn post(&mut self, qp: &mut Qp, opcode: u8, flags: u8, segments: &[u8]) {
        let entry = self.write_wqe(qp, opcode, flags, segments);
        self.ring(&entry);
    }

    /// Posts a UMR for the key, which the control segment names.
    pub fn post_umr(&mut self, qp: &mut Qp, key: u32, segments: &[u8]) {
        self.post_with(qp, 0x25, segments, |control| {
            control[12..16].copy_from_slice(&key.to_be_bytes());
        });
    }

    /// Posts a signalled work request; `change` modifies its control segment first.
    pub fn post_with(
        &mut self,
        qp: &mut Qp,
        opcode: u8,
        segments: &[u8],
        change: impl FnOnce(&mut [u8]),
    ) {
        let mut entry = self.write_wqe(qp, opcode, SIGNALED, segments);
        change(&mut entry[..16]);
        let slot = u64::from(qp.posted.wrapping_sub(entry.len().div_ceil(64) as u16));
        let slot = slot & ((1 << SEND_LOG) - 1);
        self.write(qp.send + slot * 64, &entry[..16]);
        self.ring(&entry);
    }

    /// Posts a receive WQE.
    pub fn post_recv(&mut self, qp: &mut Qp, data: &[u8]) {
        let slot = u64::from(qp.received) & ((1 << RECV_LOG) - 1);
        let mut entry = data.to_vec();
        if entry.len() < 64 {
            entry.extend_from_slice(&segment(0, 0x100, 0));
        }
        self.write(qp.recv + slot * 64, &entry);
        qp.received = qp.received.wrapping_add(1);
        self.write(qp.doorbell, &u32::from(qp.received).to_be_bytes());
    }

    /// Runs the HCA until nothing is left to do immediately. Gives up after a
    /// limit, since malformed requests may retry endlessly.
    pub fn run(&mut self) {
        for _ in 0..10_000 {
            if !self.hca.run() {
                return;
            }
        }
    }

    /// Polls the next completion.
    pub fn poll(&self, cq: &mut Cq) -> Option<Vec<u8>> {
        let entry = self.read(cq.entry(cq.index), 64);
        if entry[63] & 1 != cq.owner(cq.index) || entry[63] >> 4 == 15 {
            return None;
        }
        cq.index += 1;
        self.write(cq.doorbell, &(cq.index & 0xff_ffff).to_be_bytes());
        Some(entry)
    }
}

/// Returns the opcode of a CQE and, for an error CQE, its syndrome.
pub fn status(entry: &[u8]) -> (u8, u8) {
    let opcode = entry[63] >> 4;
    (opcode, if opcode >= 13 { entry[55] } else { 0 })
}

/// Encodes a data segment.
pub fn segment(length: u32, key: u32, va: u64) -> Vec<u8> {
    let mut bytes = length.to_be_bytes().to_vec();
    bytes.extend_from_slice(&key.to_be_bytes());
    bytes.extend_from_slice(&va.to_be_bytes());
    bytes
}

/// Encodes a remote address segment.
pub fn remote(va: u64, key: u32) -> Vec<u8> {
    let mut bytes = va.to_be_bytes().to_vec();
    bytes.extend_from_slice(&key.to_be_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes
}

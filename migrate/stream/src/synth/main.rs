//! A synthetic main channel.

use crate::token::{
    FLAG_COMPRESS_PAGE, FLAG_CONTINUE, FLAG_EOS, FLAG_FLUSH, FLAG_MEM_SIZE, FLAG_PAGE, FLAG_XBZRLE,
    FLAG_ZERO,
};

/// A section of RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// The section with the block table.
    Start,
    /// A section of a pass.
    Part,
    /// The last section.
    End,
}

/// The contents of the configuration section.
#[derive(Clone, Copy, Debug, Default)]
pub struct Configuration<'a> {
    /// Machine type.
    pub machine: &'a str,
    /// The target-page-bits subsection.
    pub page_bits: Option<u32>,
    /// The capabilities subsection, if not empty.
    pub capabilities: &'a [&'a str],
    /// The uuid subsection.
    pub uuid: Option<[u8; 16]>,
}

/// Writes a main channel, element by element.
#[derive(Debug)]
pub struct MainStream {
    out: Vec<u8>,
    page_size: usize,
    block: Option<String>,
    footers: bool,
    /// The id of the current section.
    id: u32,
}

/// Section id of RAM in synthetic streams, as in QEMU 7.2.
const RAM: u32 = 2;

impl MainStream {
    /// Creates an empty stream with pages of `page_size` bytes.
    pub fn new(page_size: usize) -> Self {
        MainStream { out: Vec::new(), page_size, block: None, footers: true, id: RAM }
    }

    /// Returns the stream without footers, as with `send-section-footer=off`.
    pub fn without_footers(mut self) -> Self {
        self.footers = false;
        self
    }

    /// Returns the bytes written since the last call.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// Bytes not taken yet.
    pub fn len(&self) -> usize {
        self.out.len()
    }

    /// Whether all bytes written have been taken.
    pub fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    /// Writes any bytes.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.out.extend_from_slice(bytes);
        self
    }

    /// Writes magic and version.
    pub fn file_header(&mut self) -> &mut Self {
        self.raw(b"QEVM\0\0\0\x03")
    }

    /// Writes the configuration section.
    pub fn configuration(&mut self, configuration: &Configuration<'_>) -> &mut Self {
        self.raw(&[0x07]).u32(len32(configuration.machine.len()));
        self.raw(configuration.machine.as_bytes());
        let subsection = |this: &mut Self, name: &str| {
            this.raw(&[0x05]).name(name).u32(1);
        };
        if let Some(bits) = configuration.page_bits {
            subsection(self, "configuration/target-page-bits");
            self.u32(bits);
        }
        if !configuration.capabilities.is_empty() {
            subsection(self, "configuration/capabilities");
            self.u32(len32(configuration.capabilities.len()));
            for name in configuration.capabilities {
                self.name(name);
            }
        }
        if let Some(uuid) = configuration.uuid {
            subsection(self, "configuration/uuid");
            self.raw(&uuid);
        }
        self
    }

    /// Writes a command.
    pub fn command(&mut self, command: u16, body: &[u8]) -> &mut Self {
        let len = u16::try_from(body.len()).expect("a command's body is short");
        self.raw(&[0x08]).raw(&command.to_be_bytes()).raw(&len.to_be_bytes()).raw(body)
    }

    /// Writes POSTCOPY_ADVISE with the page sizes of the blocks.
    pub fn advise_postcopy(&mut self, block_page_sizes: u64) -> &mut Self {
        let page = self.page_size as u64;
        self.command(3, &[block_page_sizes.to_be_bytes(), page.to_be_bytes()].concat())
    }

    /// Writes PACKAGED and its blob. Postcopy starts, so the next page names its block.
    pub fn packaged(&mut self, blob: &[u8]) -> &mut Self {
        self.block = None;
        self.command(7, &len32(blob.len()).to_be_bytes()).raw(blob)
    }

    /// Writes the head of a section of RAM.
    pub fn section(&mut self, section: Section) -> &mut Self {
        self.id = RAM;
        match section {
            Section::Start => self.named_section(0x01, RAM, "ram", 0, 4),
            Section::Part => self.raw(&[0x02]).u32(RAM),
            Section::End => self.raw(&[0x03]).u32(RAM),
        }
    }

    /// Writes the head of a START (1) or FULL (4) section.
    pub fn named_section(
        &mut self,
        tag: u8,
        id: u32,
        name: &str,
        instance: u32,
        version: u32,
    ) -> &mut Self {
        self.id = id;
        self.raw(&[tag]).u32(id).name(name).u32(instance).u32(version)
    }

    /// Writes EOS and footer of a section of RAM.
    pub fn end_of_section(&mut self) -> &mut Self {
        self.u64(FLAG_EOS).footer()
    }

    /// Writes the footer of the current section.
    pub fn footer(&mut self) -> &mut Self {
        if self.footers {
            let id = self.id;
            self.raw(&[0x7e]).u32(id);
        }
        self
    }

    /// Writes with `body`, then the footer of section `id`.
    pub fn named_footer(&mut self, id: u32, body: impl FnOnce(&mut Self)) -> &mut Self {
        self.id = id;
        body(self);
        self.footer()
    }

    /// Writes a block table without extra fields.
    pub fn block_table(&mut self, blocks: &[(&str, u64)]) -> &mut Self {
        let plain: Vec<_> = blocks.iter().map(|&(name, used)| (name, used, None, None)).collect();
        self.block_table_with(&plain)
    }

    /// Writes a block table: name, used length, block page size (postcopy with huge pages),
    /// guest-physical base (x-ignore-shared).
    pub fn block_table_with(
        &mut self,
        blocks: &[(&str, u64, Option<u64>, Option<u64>)],
    ) -> &mut Self {
        let total: u64 = blocks.iter().map(|block| block.1).sum();
        self.u64(total | FLAG_MEM_SIZE);
        for &(name, used, page_size, base) in blocks {
            self.name(name).u64(used);
            for extra in [page_size, base].into_iter().flatten() {
                self.u64(extra);
            }
        }
        self
    }

    /// Writes a FLUSH record.
    pub fn flush_marker(&mut self) -> &mut Self {
        self.u64(FLAG_FLUSH)
    }

    /// Writes a zero page.
    pub fn zero(&mut self, block: &str, address: u64) -> &mut Self {
        self.record(FLAG_ZERO, block, address).raw(&[0])
    }

    /// Writes a page record.
    pub fn page(&mut self, block: &str, address: u64, page: &[u8]) -> &mut Self {
        self.record(FLAG_PAGE, block, address).raw(page)
    }

    /// Writes a zero record or a page record, depending on the page.
    pub fn zero_or_page(&mut self, block: &str, address: u64, page: &[u8]) -> &mut Self {
        if page.iter().all(|&b| b == 0) {
            self.zero(block, address)
        } else {
            self.page(block, address, page)
        }
    }

    /// Writes an XBZRLE record.
    pub fn xbzrle(&mut self, block: &str, address: u64, delta: &[u8]) -> &mut Self {
        let len = u16::try_from(delta.len()).expect("a delta is shorter than a page");
        self.record(FLAG_XBZRLE, block, address).raw(&[0x01]).raw(&len.to_be_bytes()).raw(delta)
    }

    /// Writes a COMPRESS_PAGE record.
    pub fn compressed(&mut self, block: &str, address: u64, deflated: &[u8]) -> &mut Self {
        self.record(FLAG_COMPRESS_PAGE, block, address).u32(len32(deflated.len())).raw(deflated)
    }

    /// Writes a virtio-mem early section between RAM's START and the first PART.
    pub fn virtio_mem_early(&mut self, id: u32, region: u64, block: u64) -> &mut Self {
        self.named_section(0x04, id, "0000:00:02.0/virtio-mem-device-early", 0, 1);
        self.u64(0x1_0000_0000).u64(region).u64(block).u32(0).u64(region / 2);
        for word in 0..(region / block).div_ceil(64) {
            self.u64(word.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        }
        self.footer()
    }

    /// Writes device state of about `len` bytes, the end tag, and a description.
    pub fn device_tail(&mut self, len: usize) -> &mut Self {
        let names = ["timer", "cpu_common", "cpu", "pckbd"];
        for (i, name) in names.into_iter().enumerate() {
            self.named_section(0x04, len32(i), name, 0, 2);
            let state: Vec<u8> = (0..len / 4).map(|i| (i * i / 7).to_le_bytes()[0]).collect();
            self.raw(&state).footer();
        }
        let listed = names.map(|name| format!(r#"{{"name": "{name}", "instance_id": 0}}"#));
        let json = format!(r#"{{"page_size": 4096, "devices": [{}]}}"#, listed.join(", "));
        self.raw(&[0x00, 0x06]).u32(len32(json.len())).raw(json.as_bytes())
    }

    fn record(&mut self, flags: u64, block: &str, address: u64) -> &mut Self {
        if self.block.as_deref() == Some(block) {
            return self.u64(address | flags | FLAG_CONTINUE);
        }
        self.block = Some(block.to_owned());
        self.u64(address | flags).name(block)
    }

    fn name(&mut self, name: &str) -> &mut Self {
        self.raw(&[u8::try_from(name.len()).expect("a name is short")]).raw(name.as_bytes())
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.raw(&value.to_be_bytes())
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.raw(&value.to_be_bytes())
    }
}

fn len32(len: usize) -> u32 {
    u32::try_from(len).expect("made lengths are short")
}

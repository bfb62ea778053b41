//! The facts that a tokeniser learns about its connection.

/// The facts about one connection so far. Each field's documentation says when it changes.
///
/// Facts are hints derived from bytes, except for the three that the relays rely on: `barriers`,
/// `syncs`, `tail`. These err on the safe side, as each of them says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Facts {
    /// Bytes fed so far.
    pub fed: u64,
    /// Target page size in bytes: the default until the stream says otherwise (configuration
    /// subsection on main, `pages_alloc` on multifd), then fixed.
    pub page_size: usize,
    /// Machine type of the configuration section, at most 256 bytes, non-UTF-8 replaced.
    pub machine: Option<String>,
    /// VM UUID: configuration subsection on main, init packet on multifd.
    pub uuid: Option<[u8; 16]>,
    /// Whether the x-ignore-shared capability is on.
    pub ignore_shared: bool,
    /// Main: OPEN_RETURN_PATH (command 1) was seen.
    pub return_path: bool,
    /// Main: POSTCOPY_ADVISE (command 3) was seen: the migration may switch to postcopy.
    pub postcopy: bool,
    /// Main: POSTCOPY_LISTEN, POSTCOPY_RUN or PACKAGED was seen: the migration has switched.
    pub postcopy_running: bool,
    /// Main: offset behind the PACKAGED state that starts the destination's VM in postcopy; 0
    /// without one.
    pub switch_end: u64,
    /// Main: a section begins behind PACKAGED, or the connection recovers a paused postcopy. The
    /// source QEMU is in postcopy for good and no longer starts its own VM.
    pub switched: bool,
    /// Main: the first section of RAM has ended, or a later one has begun. Every multifd channel of
    /// the source has been opened and has written its first SYNC before: QEMU waits for that
    /// before it ends the section.
    pub set_up: bool,
    /// Main: sections of RAM behind the first that have begun, without those that the tokeniser has
    /// found behind opaque bytes.
    pub sections: u64,
    /// Main: the END section of RAM has begun. In postcopy the source has then sent all its memory.
    pub ram_end: bool,
    /// Main: ENABLE_COLO (command 8) was seen.
    pub colo: bool,
    /// Main: the source VM is certainly stopped: SWITCHOVER_START (command 11), the packaged
    /// postcopy state, or the END section of RAM was seen. It may have stopped before.
    pub vm_stopped_hint: bool,
    /// Main: barrier markers seen completely, one per [`crate::Token::Barrier`].
    ///
    /// The marker is the FLUSH record when the START section of RAM had one before its EOS, and the
    /// EOS record of every RAM section otherwise. (That does not show whether multifd is on: a
    /// relay without multifd channels ignores markers.)
    ///
    /// Undercounts rather than overcounts, because a relay waits for SYNC number `barriers`. A
    /// marker only counts inside a RAM section that the grammar reached from the file header
    /// without a gap. Nothing counts after the tokeniser has resumed behind opaque bytes
    /// (`resyncs`), nor in postcopy, nor the kind of marker that START did not choose. So a
    /// destination QEMU that reads the same bytes waits at each counted marker.
    pub barriers: u64,
    /// Multifd: packets with SYNC seen completely, payload included.
    ///
    /// Once `opaque` is set on a multifd channel, do not wait for this number any more.
    pub syncs: u64,
    /// Main: the end of RAM, an end-of-stream tag, a PACKAGED state, or opaque bytes were reached.
    /// The byte that starts the destination's VM (the 0x00 end-of-stream tag, or the last byte of
    /// PACKAGED) may be at `tail_at` or behind it. Only `switched` takes this back: then only the
    /// destination's VM can run.
    pub tail: bool,
    /// Offset in the stream at which `tail` became true: no byte before it starts a VM. A token
    /// begins there. Meaningless while `tail` is false.
    pub tail_at: u64,
    /// Whether the bytes are not understood at present. This is normal on main in the device state,
    /// and permanent on a multifd channel.
    pub opaque: bool,
    /// Main: how often the tokeniser resumed behind opaque bytes.
    pub resyncs: u64,
    /// Multifd: channel id of the init packet.
    pub channel: Option<u8>,
    /// Multifd: compression method of the last packet that had one (2 zlib, 4 zstd, 8 qpl, 16
    /// uadk, 32 qatzip; 0 none).
    pub multifd_method: u32,
    /// Multifd: RAM packets whose header was seen.
    pub packets: u64,
    /// Multifd: device-state packets (flag 0x40) whose header was seen.
    pub device_packets: u64,
    /// Main: bytes of RAM that the block table lists; 0 until it begins.
    pub ram: u64,
    /// Non-zero pages announced: page records on main, `normal_pages` of packets.
    pub normal: u64,
    /// Zero pages announced: zero records on main, `zero_pages` of packets.
    pub duplicate: u64,
    /// Main: XBZRLE records.
    pub xbzrle: u64,
    /// Main: COMPRESS_PAGE records (QEMU's `compress`, up to 9.0).
    pub compressed_records: u64,
}

impl Facts {
    pub(crate) fn new(page_size: usize) -> Self {
        Facts {
            fed: 0,
            page_size,
            machine: None,
            uuid: None,
            ignore_shared: false,
            return_path: false,
            postcopy: false,
            postcopy_running: false,
            switch_end: 0,
            switched: false,
            set_up: false,
            sections: 0,
            ram_end: false,
            colo: false,
            vm_stopped_hint: false,
            barriers: 0,
            syncs: 0,
            ram: 0,
            tail: false,
            tail_at: 0,
            opaque: false,
            resyncs: 0,
            channel: None,
            multifd_method: 0,
            packets: 0,
            device_packets: 0,
            normal: 0,
            duplicate: 0,
            xbzrle: 0,
            compressed_records: 0,
        }
    }
}

//! What a tokeniser learnt of its connection.

/// What one connection told about itself so far; see each field for when it changes.
///
/// Facts are hints from bytes, except where the relays stand on them: `barriers`, `syncs`, `tail`.
/// Those three err on the harmless side, as said on each.
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
    /// The x-ignore-shared capability is on.
    pub ignore_shared: bool,
    /// Main: OPEN_RETURN_PATH (command 1) was seen.
    pub return_path: bool,
    /// Main: POSTCOPY_ADVISE (command 3) was seen: the migration may turn to postcopy.
    pub postcopy: bool,
    /// Main: POSTCOPY_LISTEN, POSTCOPY_RUN or PACKAGED was seen: it has turned.
    pub postcopy_running: bool,
    /// Main: offset behind the PACKAGED state that starts the destination's VM in postcopy; 0 while
    /// there is none.
    pub switch_end: u64,
    /// Main: a section begins behind PACKAGED, or the connection takes up a paused postcopy. The
    /// source QEMU is in postcopy for good and starts its own VM no more, whatever happens.
    pub switched: bool,
    /// Main: ENABLE_COLO (command 8) was seen.
    pub colo: bool,
    /// Main: the source VM is certainly stopped: SWITCHOVER_START (command 11), the packaged
    /// postcopy state, or the END section of RAM was seen. It may have stopped before.
    pub vm_stopped_hint: bool,
    /// Main: barrier markers seen completely, one per [`crate::Token::Barrier`].
    ///
    /// The marker is the FLUSH record when the START section of RAM had one before its EOS, and
    /// the EOS record of every RAM section otherwise (which says nothing of whether multifd is on:
    /// a relay without multifd channels ignores markers).
    ///
    /// Undercounts rather than overcounts, because a relay waits for SYNC number `barriers`: a
    /// marker only counts inside a RAM section reached by grammar alone from the file header.
    /// Nothing counts once the tokeniser had to resume after opaque bytes (`resyncs`), nor in
    /// postcopy, nor the other kind of marker than the one chosen in START. Each counted marker is
    /// thus one that a destination QEMU would wait at, had it read the same bytes.
    pub barriers: u64,
    /// Multifd: packets with SYNC seen completely, payload included.
    ///
    /// When `opaque` is set on any multifd channel this number is no longer to be waited for.
    pub syncs: u64,
    /// Main: the end of RAM, an end-of-stream tag, a PACKAGED state, or opaque bytes were reached:
    /// what starts the destination's VM (the 0x00 end-of-stream tag, or the last byte of PACKAGED)
    /// may be at `tail_at` or behind it. Taken back by `switched` alone: the destination's VM is
    /// then the only one that can run.
    pub tail: bool,
    /// Offset in the stream at which `tail` became true: nothing that starts a VM stands before it.
    /// A token begins there. Meaningless while `tail` is false.
    pub tail_at: u64,
    /// The bytes are not understood at present. Normal on main in the device state; on a multifd
    /// channel it stays.
    pub opaque: bool,
    /// Main: times the tokeniser found its way back from opaque bytes.
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
            colo: false,
            vm_stopped_hint: false,
            barriers: 0,
            syncs: 0,
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

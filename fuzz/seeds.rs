//! The seeds of all targets: the repository's golden streams, synthetic streams of every style, and
//! these packed and encoded. As a program it writes them into the folder given by its first
//! argument.

use std::collections::hash_map::DefaultHasher;
use std::error::Error;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use codec::{Codec, Encoder, HistoryEncoder, PartHeader, Settings, UnitHeader};
use image::{Options, RamBlock, State, Store, Writer};
// The run-time that instrumented objects need.
use libfuzzer_sys as _;
use recorder::{record, Ending};
use session::{encode_preamble, AckEntry, FrameType, Header, Hello, Histories, Setup, Welcome};
use stream::synth::{main_stream, mapped_ram_file, multifd_streams, Style};
use stream::{classify, pack, Kind, Tokeniser};

/// Longest seed: libFuzzer slows down with its inputs.
const MAX_SEED: usize = 24 * 1024;
const PAGE: usize = 4096;

#[allow(dead_code, reason = "the tests of seeds include this file")]
fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(std::env::args_os().nth(1).ok_or("usage: seeds FOLDER")?);
    for (target, bytes) in all()? {
        let folder = root.join(target);
        fs::create_dir_all(&folder)?;
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        fs::write(folder.join(format!("seed-{:016x}", hasher.finish())), bytes)?;
    }
    Ok(())
}

/// Seeds by their target.
pub(crate) fn all() -> Result<Vec<(&'static str, Vec<u8>)>, Box<dyn Error>> {
    let mut all = Vec::new();
    add_peer(&mut all)?;
    add_host(&mut all)?;
    for bytes in streams()? {
        add_of_stream(&bytes, &mut all)?;
    }
    for style in [Style::Qemu72, Style::Qemu90, Style::Qemu92] {
        let (main, channels) = multifd_streams(style, PAGE, 2, (0..5u8).map(|i| vec![i; PAGE]));
        let lengths = [&main, &channels[0]].map(|bytes| u16::try_from(bytes.len()));
        let lengths = [lengths[0]?.to_be_bytes(), lengths[1]?.to_be_bytes()].concat();
        all.push(("record_multifd", [lengths, main, channels.concat()].concat()));
    }
    Ok(all)
}

/// The repository's golden streams, and synthetic ones.
fn streams() -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    let golden = golden();
    let mut streams = Vec::new();
    for entry in fs::read_dir(&golden)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ext| ext == "z") {
            let mut bytes = Vec::new();
            flate2::read::ZlibDecoder::new(fs::File::open(&path)?).read_to_end(&mut bytes)?;
            streams.push(bytes);
        }
    }
    for style in [Style::Qemu72, Style::Qemu90, Style::Qemu92] {
        let pages = || (0..3u8).map(|i| vec![i; PAGE]);
        streams.push(main_stream(style, PAGE, pages()));
        let (main, channels) = multifd_streams(style, PAGE, 2, pages());
        streams.push(main);
        streams.extend(channels);
    }
    Ok(streams)
}

/// The golden streams' folder, seen from fuzz/ or from tests/seeds.
fn golden() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let near = here.join("../migrate/stream/tests/golden");
    if near.exists() {
        near
    } else {
        here.join("../../migrate/stream/tests/golden")
    }
}

/// Bytes of a peer relay, and of the destination QEMU's return path.
fn add_peer(all: &mut Vec<(&'static str, Vec<u8>)>) -> Result<(), Box<dyn Error>> {
    let mut add = |target, bytes: &[u8]| all.push((target, bytes.to_vec()));
    for kind in [FrameType::Open, FrameType::Data, FrameType::Eof, FrameType::Ack, FrameType::Abort]
    {
        let len = if kind == FrameType::Data { 4000 } else { 0 };
        let header =
            Header { seq: 9, offset: 1 << 33, plain_len: len, hash: 42, ..Header::free(kind, len) };
        let mut acks = Vec::new();
        AckEntry { stream: 3, seq: 9, offset: 1 << 33, hash: 42 }.write(&mut acks);
        add("wire_frame", &[&header.to_bytes()[..], &acks].concat());
    }
    let hello = Hello {
        session: "0123456789abcdef".repeat(2),
        link: 0,
        links: 4,
        token: None,
        page_size: 4096,
        name: Some("vm".into()),
        setup: Some(Setup { channels: 2, postcopy: true, ..Setup::with_return_path() }),
        codecs: vec!["zstd".into(), "lz4".into()],
        delta_cache: 1 << 28,
        histories: Histories::sized(4, 1 << 24),
        seed: 1 << 20,
        ask: false,
        again: false,
        pass: false,
    };
    let again = Hello { link: 3, token: Some("f".repeat(32)), ask: true, ..hello.clone() };
    let welcome = Welcome { token: "f".repeat(32), chunk_bytes: 557_056, ..Welcome::default() };
    let over =
        Welcome { error: Some("it has ended".into()), committed: Some(true), ..welcome.clone() };
    for bytes in [
        encode_preamble("seeds", &hello)?,
        encode_preamble("seeds", &again)?,
        encode_preamble("seeds", &welcome)?,
        encode_preamble("seeds", &over)?,
    ] {
        add("hello", &bytes);
    }
    // PONG, a bitmap behind its frame, SHUT; in pieces of 3 and of 256 bytes.
    let mut back = vec![0, 2, 0, 4, 0, 0, 0, 1, 0, 5, 0, 2, 1, b'a', 0, 0, 0, 0, 0, 0, 0, 8];
    back.extend([0xa5; 8].iter().chain(&0x0123_4567_89ab_cdef_u64.to_be_bytes()));
    back.extend([0, 1, 0, 4, 0, 0, 0, 1]);
    for size in [2, 255] {
        add("return_path", &[&[size], &back[..]].concat());
    }
    // The same with a request before it, of a block and then of the same one.
    let mut asked = vec![0, 3, 0, 14, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0x10, 0, 1, b'a'];
    asked.extend([0, 4, 0, 12, 0, 0, 0, 0, 0, 0, 0x30, 0, 0, 0, 0x10, 0, 0, 6, 0, 4, 0, 0, 0, 1]);
    for size in [2, 255] {
        add("restore_back", &[&[size, 4], &asked[..], &back[..]].concat());
    }
    // OPEN of a file, a READ of an unknown one, END; then a reply with 12 bytes, and a refusal.
    let mut requests = vec![1, 2, 0, 2];
    requests.resize(32, 0);
    requests.extend(*b"vm\x02\0\0\0\0\0\0\x05");
    requests.resize(66, 1);
    requests.push(3);
    requests.resize(98, 0);
    add("remote_image", &[&[0], &requests[..]].concat());
    add("remote_image", b"\x19\0\0\0\0\0\0\0\x0ctwelve bytes");
    add("remote_image", b"\x19\x02\0\0\0\0\0\0\x06in use");
    // Three chunks of one frame.
    let mut encoder = HistoryEncoder::new(1, 6, 20)?;
    let mut parts = Vec::new();
    for chunk in [b"a page, ".repeat(300), b"another page, ".repeat(200), b"a page, ".repeat(90)] {
        let mut part = vec![0; chunk.len()];
        let len = encoder.encode(&chunk, &mut part).ok_or("does not shrink")?;
        let (header, bytes) = part[..len].split_at(PartHeader::LEN);
        parts.extend_from_slice(header);
        parts.extend_from_slice(&u16::try_from(bytes.len())?.to_le_bytes());
        parts.extend_from_slice(&u16::try_from(chunk.len())?.to_le_bytes());
        parts.extend_from_slice(bytes);
    }
    add("history_decode", &parts);
    // Slots, pages, the table's length, a table of two runs, and bytes.
    add("delta_apply", &[16, 5, 8, 0, 8, 2, 0, 0b01, 8, 1, 4, 1, 1, 2, 3]);
    Ok(())
}

/// Files, backing devices, monitors, NBD clients and servers: everything but the peer.
fn add_host(all: &mut Vec<(&'static str, Vec<u8>)>) -> Result<(), Box<dyn Error>> {
    let mut add = |target, bytes: &[u8]| all.push((target, bytes.to_vec()));
    add("libvirt_head", &[&recorder::head(b"<domain/>", true)?[..], b"QEVM"].concat());
    let pages = [vec![1; PAGE], vec![0; PAGE]];
    for first in [0, 7] {
        let file = mapped_ram_file("pc", &[("pc.ram", &pages[..])], PAGE, PAGE, first.into());
        add("mapped_ram", &[&[first], &file[..]].concat());
    }
    add(
        "libvirt_answers",
        b"\x01<domain><name>a</name><uuid>592ef32c27a54f79ba4916196c787853</uuid>\
        <os><type machine='q35'>hvm</type></os><!-- > --></domain>",
    );
    // A label of QEMU's user, a state, and an error.
    let (label, program) =
        ("<a><secmodel><model>dac</model><baselabel>+1:+2</baselabel></secmodel></a>", 0x2000_8086);
    let numbers =
        |all: &[u32]| all.iter().flat_map(|number| number.to_be_bytes()).collect::<Vec<_>>();
    let len = u32::try_from(label.len())?;
    let padded = [label.as_bytes(), &[0; 3][..(4 - label.len() % 4) % 4]].concat();
    add(
        "libvirt_answers",
        &[
            &[2][..],
            &numbers(&[32 + len.next_multiple_of(4), program, 1, 7, 1, 3, 0, len]),
            &padded,
            &numbers(&[36, program, 1, 212, 1, 4, 0, 1, 10]),
            &numbers(&[44, program, 1, 303, 1, 5, 1, 55, 10, 0, 2]),
        ]
        .concat(),
    );
    let image = image()?;
    add("image_open", &[&[0], &image[..]].concat());
    // Sealed anew: units, state and index by the places in the trailer.
    let trailer = &image[image.len() - 96..];
    let place =
        |at: usize| u64::from_be_bytes(trailer[at..at + 8].try_into().expect("8 bytes")) as usize;
    let (state, index, end) = (place(16), place(40), image.len() - 96);
    let len = |len: usize| u16::try_from(len).expect("a small image").to_be_bytes();
    let lens = [len(state - 64), len(index - state)].concat();
    add("image_open", &[&[1], &lens[..], &image[64..end]].concat());
    // Writes, a restart, compaction, discards; then words for the table.
    let ops: Vec<u8> =
        (0..600_u32).flat_map(|n| (n.wrapping_mul(0x9e37_79b9)).to_le_bytes()).collect();
    add("store_ops", &[&[0][..], &ops].concat());
    add("store_ops", &[&[200][..], &ops].concat());
    // In each part of the file: its first words, and some later ones.
    for (part, at) in
        (0..7_u8).flat_map(|part| [0_u16, 8, 24, 64, 72, 904, 2100].map(|at| (part, at)))
    {
        for word in [0, u64::MAX, 0x8000_2000_0004_1005_u64 + u64::from(at) * 3] {
            add("store_attach", &[&[part][..], &at.to_le_bytes(), &word.to_le_bytes()].concat());
        }
    }
    for at in [0_u16, 8, 24, 32, 40, 4096, 4104, 4200, 8192] {
        let word = 0x0123_4567_89ab_cdef_u64 + u64::from(at);
        let change = [&at.to_le_bytes()[..], &word.to_le_bytes()].concat();
        add("backing_header", &[&[48][..], &change].concat());
    }
    for (choice, format) in [(0, filter::Format::Zstd), (1, filter::Format::Gzip)] {
        let mut stream = Vec::new();
        let options = filter::Options::new(format, 1);
        filter::compress(&options, &mut &ops[..], &mut stream)?;
        add("filter_streams", &[&[choice][..], &stream].concat());
        add("filter_streams", &[&[choice][..], &stream, &stream[..stream.len() - 3]].concat());
    }
    add("filter_streams", b"\x02\0\x58\x31\0\0abcdef");
    add("filter_streams", b"\x03\0\0\0\0\0\0\x03\x4b\x04\0");
    for seed in saves()? {
        add("save_open", &seed);
    }
    add("nbd_parse", &nbd_client());
    for (id, said) in MONITOR.iter().enumerate() {
        add("qmp_replies", &[b"\x01{\"return\": ", said.as_bytes(), b", \"id\": 2}\n"].concat());
        let event =
            r#"{"event": "MIGRATION", "data": {"status": "active"}, "timestamp": {"seconds": 1}}"#;
        let error = r#"{"error": {"class": "GenericError", "desc": "no"}, "id": 3}"#;
        let reply = format!("\x01{event}\n{error}\n{{\"return\": {said}, \"id\": {}}}\n", id + 2);
        add("qmp_replies", reply.as_bytes());
    }
    add("qmp_replies", b"\0{\"QMP\": {\"version\": {\"qemu\": {\"micro\": 0, \"minor\": 2, \"major\": 7}}}}\n{\"return\": {}, \"id\": 1}\n");
    add(
        "swap_nbd",
        &[b"\x01\0NBDMAGICIHAVEOPT\0\x03", &(1_u64 << 30).to_be_bytes()[..], &[1, 0x6d]].concat(),
    );
    let attribute = [8_u16.to_ne_bytes(), 1_u16.to_ne_bytes(), [7, 0], [0, 0]].concat();
    for (kind, body) in [(0x1c_u16, [&[1, 2, 0, 0][..], &attribute].concat()), (2, vec![0; 20])] {
        let len = u32::try_from(16 + body.len())?.to_ne_bytes();
        add("swap_nbd", &[b"\x01\0", &len[..], &kind.to_ne_bytes(), &[0; 10], &body].concat());
    }
    add("policy_settings", b"[policy]\nenabled = true\nidle = 3\nidle_pressed = 2\nperiod = 60\ncodec = 'zlib'\nlevel = 6\ngroup = 8\ngain = 5\ncpu = 7\ncpu_pressed = 9\n[policy.pressure]\nfile = '/x'\nstall = 70\nwindow = 500\n");
    add("memory_map", b"FlatView #2\n AS \"memory\", root: system\n  0000000000000000-000000000009ffff (prio 0, ram): pc.ram KVM\n  00000000000c0000-00000000000c0fff (prio 0, rom): pc.ram\n  0000000000100000-0000000007ffffff (prio 0, ram): pc.ram\n");
    add("policy_settings", b"some avg10=12.34 avg60=0.00 avg300=0.00 total=7\nfull avg10=99.00\n");
    Ok(())
}

/// A small image with pages of every kind.
fn image() -> Result<Vec<u8>, Box<dyn Error>> {
    // Tests make it in several threads at once.
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let nth = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("platen-seed-{}-{nth}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let options = Options { unit_bytes: 64 << 10, threads: 1, ..Options::default() };
    let mut writer = Writer::create(&path, options)?;
    let pages = (0..20u8).map(|i| match i {
        0..4 => vec![0; PAGE],
        4..8 => vec![i; PAGE],
        _ => (0..PAGE).map(|at| (at / 16 * usize::from(i)) as u8).collect(),
    });
    let stream = main_stream(Style::Qemu92, PAGE, pages);
    let recorded = record(&stream[..], &mut writer, Ending::Closed)?;
    writer.finish(&recorded.state)?.link()?;
    let bytes = fs::read(&path);
    fs::remove_file(&path)?;
    Ok(bytes?)
}

/// Two saves of a store in the form that `save_open` reads: the second has pages of the first's
/// pack, differences, and a page of its own.
fn saves() -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let nth = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("platen-seed-store-{}-{nth}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    let store = Store::create(&folder)?;
    let options = Options { unit_bytes: 64 << 10, threads: 1, ..Options::default() };
    let mut pages: Vec<Vec<u8>> =
        (0..20_usize).map(|i| (0..PAGE).map(|at| (at / 16 * (i + 3)) as u8).collect()).collect();
    let mut parent = None;
    let mut seeds = Vec::new();
    for name in ["one", "two"] {
        let mut writer = Writer::create_in(&store, name, parent, options.clone())?;
        let len = (pages.len() * PAGE) as u64;
        writer.blocks(PAGE, &[RamBlock { name: "ram".into(), len, host_page: 0 }])?;
        for (number, page) in (0..).zip(&pages) {
            writer.page(0, number, page)?;
        }
        writer.finish(&State { facts: b"{}".to_vec(), ..State::default() })?.link()?;
        let mut packs = Vec::new();
        for entry in fs::read_dir(folder.join("packs"))? {
            packs.push(entry?.path());
        }
        let mut seed = vec![u8::try_from(packs.len())?];
        for path in packs {
            let bytes = fs::read(path)?;
            let (first, index, end) = parts(&bytes)?;
            seed.extend(&bytes[end + 72..end + 88]);
            for len in [first - 64, index - first, end - index] {
                seed.extend(u16::try_from(len)?.to_be_bytes());
            }
            seed.extend(&bytes[64..end]);
        }
        let bytes = fs::read(folder.join(name))?;
        let (first, index, end) = parts(&bytes)?;
        seed.extend(u16::try_from(index - first)?.to_be_bytes());
        seed.extend(&bytes[first..end]);
        seeds.push(seed);
        parent = Some("one");
        pages[3][100] ^= 1;
        pages[17][7] ^= 1;
        pages[5].fill(9);
        pages[6].reverse();
    }
    fs::remove_dir_all(&folder)?;
    Ok(seeds)
}

/// Offsets of the first part, the index and the trailer.
fn parts(bytes: &[u8]) -> Result<(usize, usize, usize), Box<dyn Error>> {
    let end = bytes.len() - 96;
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    Ok((usize::try_from(word(end + 16))?, usize::try_from(word(end + 40))?, end))
}

/// The seeds from one stream: itself, packed, and as units of each codec.
fn add_of_stream(
    bytes: &[u8],
    all: &mut Vec<(&'static str, Vec<u8>)>,
) -> Result<(), Box<dyn Error>> {
    let mut add = |target, bytes: &[u8]| all.push((target, bytes.to_vec()));
    let kind = classify(bytes).unwrap_or(Kind::Other);
    let number = match kind {
        Kind::Multifd => 1,
        Kind::Recovery => 3,
        _ => 0,
    };
    // A stream that is plain and whole, or the beginning of another.
    add("record_stream", &bytes[..bytes.len().min(2 * MAX_SEED)]);
    // The head of the stream.
    let head = &bytes[..bytes.len().min(MAX_SEED)];
    for cuts in [&[0u8][..], &[2, 0x07, 0x10, 0x50, 0x00]] {
        // Page size 4096 is number 2 of the sizes.
        add("tokenise", &[&[number + 10][..], cuts, head].concat());
    }
    let mut tokens = Vec::new();
    let mut tokeniser = Tokeniser::new(kind, PAGE);
    tokeniser.feed(head, &mut tokens);
    let mut packed = vec![0; head.len() + 64 + 16 * tokens.len()];
    let len = pack(head, &tokens, PAGE, &mut packed).ok_or("does not pack")?;
    let plain = u32::try_from(head.len())?.to_le_bytes();
    add("unpack", &[&plain[..], &packed[..len]].concat());
    for codec in [Codec::Raw, Codec::Lz4, Codec::Zlib, Codec::Zstd, Codec::DeflateQz] {
        let mut encoder = Encoder::new(Settings::new(codec, None)?)?;
        for plain in [&head[..head.len().min(5000)], &[7; 4096], b"short"] {
            let mut out = vec![0; plain.len()];
            let encoded = encoder.encode(plain, &mut out);
            let payload = if encoded.codec == Codec::Raw { plain } else { &out[..encoded.len] };
            let unit = [&UnitHeader::of(plain, encoded).to_bytes()[..], payload].concat();
            add("codec_decode", &unit);
        }
    }
    Ok(())
}

/// Results of monitor commands.
const MONITOR: [&str; 5] = [
    "{}",
    r#"{"status": "running", "running": true, "singlestep": false}"#,
    r#"{"name": "vm", "UUID": "550e8400-e29b-41d4-a716-446655440000"}"#,
    r#"{"status": "completed", "total-time": 9, "downtime": 3, "setup-time": 1, "error-desc": "x", "ram": {"transferred": 4096, "remaining": 0, "total": 8192, "duplicate": 1, "normal": 1, "page-size": 4096, "mbps": 1.5}, "compression": {"pages": 1, "busy": 0, "busy-rate": 0.5, "compressed-size": 3, "compression-rate": 1.25}}"#,
    r#"{"multifd-channels": 2, "max-bandwidth": 0}"#,
];

/// A client with all options, and one request of each kind.
fn nbd_client() -> Vec<u8> {
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    let context = [
        &4_u32.to_be_bytes()[..],
        b"swap",
        &1_u32.to_be_bytes(),
        &15_u32.to_be_bytes(),
        b"base:allocation",
    ];
    let name = [&4_u32.to_be_bytes()[..], b"swap", &[0, 1, 0, 3]].concat();
    for (option, body) in
        [(8_u32, vec![]), (3, vec![]), (10, context.concat()), (6, name.clone()), (7, name)]
    {
        bytes.extend(b"IHAVEOPT");
        bytes.extend(option.to_be_bytes());
        bytes.extend(u32::try_from(body.len()).expect("short").to_be_bytes());
        bytes.extend(body);
    }
    for kind in [0_u16, 1, 3, 4, 6, 7, 2] {
        bytes.extend(0x2560_9513_u32.to_be_bytes());
        bytes.extend([0; 2]);
        bytes.extend(kind.to_be_bytes());
        bytes.extend([7; 8]);
        bytes.extend(8192_u64.to_be_bytes());
        bytes.extend(4096_u32.to_be_bytes());
        if kind == 1 {
            bytes.extend([0x5a; 4096]);
        }
    }
    bytes
}

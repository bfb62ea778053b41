//! Programs that others have written for NBD: nbdinfo, nbdcopy, nbdsh, qemu-io, fio.

use super::*;

#[test]
fn nbdinfo_reports_the_documented_capabilities() {
    if !have(&["nbdinfo"]) {
        return;
    }
    let served = Served::new(&[]);
    let info: serde_json::Value =
        serde_json::from_str(&run(Command::new("nbdinfo").args(["--json", &served.uri()])))
            .unwrap();
    let export = &info["exports"][0];
    assert_eq!(info["structured"], true);
    assert_eq!(export["export-size"], 256 * MIB);
    assert_eq!(export["export-name"], "judged");
    assert_eq!(export["contexts"][0], "base:allocation");
    for promised in [
        "can_df",
        "can_fast_zero",
        "can_flush",
        "can_fua",
        "can_multi_conn",
        "can_trim",
        "can_zero",
    ] {
        assert_eq!(export[promised], true, "{promised}");
    }
    assert_eq!(export["is_read_only"], false);
    assert_eq!(export["block_size_minimum"], 1);
    assert_eq!(export["block_size_preferred"], 4096);
    assert_eq!(export["block_size_maximum"], 32 * MIB);
    let map = run(Command::new("nbdinfo").args(["--map", &served.uri()]));
    assert!(map.contains("268435456    3  hole,zero"), "{map}");
    let list = run(Command::new("nbdinfo").args(["--list", &served.uri()]));
    assert!(list.contains("export=\"judged\""), "{list}");
    let other = format!("nbd+unix:///other?socket={}", served.path("nbd.sock").display());
    assert!(!output(Command::new("nbdinfo").arg(other)).status.success());
    served.end();
}

#[test]
fn nbdcopy_gets_back_what_it_put_in() {
    if !have(&["nbdcopy", "nbdinfo"]) {
        return;
    }
    let codecs = ["zstd", "none", "lz4", "zlib"];
    let most = if std::env::var_os("PLATEN_QUICK").is_some() { 2 } else { codecs.len() };
    for codec in &codecs[..most] {
        let served = Served::new(&["--codec", codec, "--workers", "3"]);
        let (plain, copy) = (served.path("plain"), served.path("copy"));
        let mut image = image(40 * MIB + 12345);
        fs::write(&plain, &image).unwrap();
        run(Command::new("nbdcopy").arg(&plain).arg(served.uri()));
        run(Command::new("nbdcopy").arg(served.uri()).arg(&copy));
        image.resize(256 * MIB, 0);
        assert!(fs::read(&copy).unwrap() == image, "{codec}: another content");
        // Every extent reported as zero is zero, and one reported as a hole takes no memory.
        let map: serde_json::Value = serde_json::from_str(&run(Command::new("nbdinfo").args([
            "--map",
            "--json",
            &served.uri(),
        ])))
        .unwrap();
        let mut at = 0;
        for extent in map.as_array().unwrap() {
            let (offset, length) = (extent["offset"].as_u64(), extent["length"].as_u64());
            let range = usize::try_from(offset.unwrap()).unwrap();
            let range = range..range + usize::try_from(length.unwrap()).unwrap();
            assert_eq!(range.start, at);
            at = range.end;
            if extent["type"].as_u64().unwrap() & 2 != 0 {
                assert!(image[range].iter().all(|&byte| byte == 0), "{codec}: {extent}");
            }
        }
        assert_eq!(at, image.len());
        let stat = served.stat();
        assert_eq!(stat["io_stat"]["failed_reads"], 0);
        assert_eq!(stat["io_stat"]["failed_writes"], 0);
        assert!(stat["mm_stat"]["orig_data_size"].as_u64().unwrap() <= 41 * MIB as u64);
        served.end();
    }
}

/// Every command and flag, odd alignments, and errors, by libnbd's own shell.
// Over 80 lines: one script of nbdsh, in the order of the protocol.
#[test]
fn nbdsh_finds_every_command_as_the_protocol_defines_it() {
    if !have(&["nbdsh"]) {
        return;
    }
    let served = Served::new(&["--mem-limit", "64M"]);
    let script = r#"
import errno, os
def fails(number, call, *arguments):
    try:
        call(*arguments)
    except nbd.Error as error:
        assert error.errnum == number, error
    else:
        raise AssertionError("no error")

h.add_meta_context("base:allocation")
h.set_strict_mode(0)
h.connect_uri(URI)
assert h.get_structured_replies_negotiated()
size = h.get_size()
model = bytearray(1 << 20)
def put(data, offset, *flags):
    h.pwrite(data, offset, *flags)
    model[offset:offset + len(data)] = data
def zero(length, offset, *flags):
    h.zero(length, offset, *flags)
    model[offset:offset + length] = bytes(length)
def check():
    assert h.pread(len(model), 0) == model
check()
put(os.urandom(70001), 4097)
put(b"x" * 10, 4090)
put(b"y" * 4096, 8192, nbd.CMD_FLAG_FUA)
put(b"z", 0)
put(os.urandom(600000), 300001)
check()
assert h.pread(3000, 4000, nbd.CMD_FLAG_DF) == model[4000:7000]
fails(errno.EOVERFLOW, h.pread, 1 << 20, 0, nbd.CMD_FLAG_DF)
zero(9000, 5000)
zero(100000, 77 * 4096, nbd.CMD_FLAG_NO_HOLE)
zero(5, 500000, nbd.CMD_FLAG_FAST_ZERO)
h.flush()
check()
extents = []
def extent(context, offset, entries, error):
    assert context == "base:allocation"
    extents.extend(zip(entries[0::2], entries[1::2]))
h.block_status(100000, 77 * 4096, extent)
assert extents == [(100000 // 4096 * 4096, nbd.STATE_ZERO), (100000 % 4096, 0)], extents
extents.clear()
h.trim(1 << 20, 0)
model[:] = bytes(len(model))
check()
h.block_status(1 << 19, 777, extent, nbd.CMD_FLAG_REQ_ONE)
assert extents == [(1 << 19, nbd.STATE_HOLE | nbd.STATE_ZERO)], extents

fails(errno.EINVAL, h.pread, 512, size - 511)
fails(errno.ENOSPC, h.pwrite, b"x" * 512, size - 511)
fails(errno.ENOSPC, h.zero, 512, size - 511)
fails(errno.EINVAL, h.trim, 512, size)
fails(errno.EINVAL, h.cache, 512, 0)
fails(errno.EINVAL, h.pread, 512, 0, 1 << 9)
# The limit: noise for more memory than there is. Stored pages stay.
stored = {}
full = False
for offset in range(0, 128 << 20, 1 << 20):
    noise = os.urandom(1 << 20)
    try:
        h.pwrite(noise, offset)
        stored[offset] = noise
    except nbd.Error as error:
        assert error.errnum == errno.ENOSPC, error
        full = True
assert full and 30 < len(stored) < 64, len(stored)
for offset, noise in stored.items():
    assert h.pread(1 << 20, offset) == noise
h.shutdown()
print("all of it")
"#;
    let script = script.replace("URI", &format!("{:?}", served.uri()));
    let said = run(Command::new("nbdsh").args(["-c", &script]));
    assert_eq!(said, "all of it\n");
    let stat = served.stat();
    assert!(stat["io_stat"]["failed_writes"].as_u64().unwrap() > 0);
    assert_eq!(stat["io_stat"]["failed_reads"], 0);
    assert!(stat["mm_stat"]["mem_used_max"].as_u64().unwrap() <= 64 * MIB as u64);
    assert_eq!(stat["mm_stat"]["mem_limit"], 64 * MIB);
    served.end();
}

#[test]
fn qemu_reads_what_it_wrote_and_compares_equal() {
    if !have(&["qemu-io", "qemu-img"]) {
        return;
    }
    let served = Served::new(&["--codec", "zstd", "--level", "3"]);
    let said = run(Command::new("qemu-io").args(["-f", "raw", &served.uri()]).args(
        [
            "write -P 0x5a 1000 70000",
            "read -P 0x5a 1000 70000",
            "write -z 4096 100000",
            "read -P 0 4096 66904",
            "read -P 0x5a 1000 3096",
            "write -z -u 200M 10M",
            "aio_write -P 0x11 32M 1M",
            "aio_write -P 0x22 40M 3000001",
            "aio_write -P 0x33 50M 4M",
            "aio_flush",
            "read -P 0x11 32M 1M",
            "read -P 0x22 40M 3000001",
            "read -P 0x33 50M 4M",
            "discard 50M 2M",
            "read -P 0 50M 2M",
            "read -P 0x33 52M 2M",
            "flush",
        ]
        .iter()
        .flat_map(|command| ["-c", command]),
    ));
    // qemu-io reports it, and continues.
    assert!(!said.contains("failed") && !said.contains("rror"), "{said}");
    let plain = served.path("plain");
    let mut image = image(64 * MIB);
    image.resize(256 * MIB, 0);
    fs::write(&plain, image).unwrap();
    let (plain, uri) = (plain.to_str().unwrap(), &served.uri());
    run(Command::new("qemu-img").args(["convert", "-n", "-f", "raw", "-O", "raw", plain, uri]));
    let same =
        run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw", plain, uri]));
    assert!(same.contains("identical"), "{same}");
    served.end();
}

/// Random writes of odd sizes and depths by two clients, each verified by fio's own checksums.
#[test]
fn fio_verifies_every_block() {
    if !have(&["fio"]) {
        return;
    }
    if !run(Command::new("fio").arg("--enghelp")).contains("nbd") {
        eprintln!("skipped: this fio has no nbd engine");
        return;
    }
    let served = Served::new(&["--codec", "lz4", "--workers", "2"]);
    let jobs = format!(
        "[global]\nioengine=nbd\nuri={}\nverify=crc32c\nverify_fatal=1\nverify_backlog=64\n\
         buffer_compress_percentage=60\nrefill_buffers\nio_size=24m\n\
         [small]\nrw=randrw\nbs=4k\niodepth=16\noffset=0\nsize=24m\n\
         [odd]\nrw=randwrite\nbsrange=512-300k\nbs_unaligned\niodepth=8\noffset=64m\nsize=24m\n\
         [large]\nrw=write\nbs=1m\niodepth=4\noffset=128m\nsize=24m\n",
        served.uri()
    );
    let file = served.path("jobs.fio");
    fs::write(&file, jobs).unwrap();
    let result = served.path("result.json");
    let mut command = Command::new("fio");
    command.args(["--output-format=json", "--output"]).arg(&result).arg(&file);
    run(command.current_dir(served.folder.path()));
    let text = fs::read_to_string(&result).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text[text.find('{').unwrap()..]).unwrap();
    for job in json["jobs"].as_array().unwrap() {
        let name = &job["jobname"];
        assert_eq!(job["error"], 0, "{name}");
        assert!(job["write"]["total_ios"].as_u64().unwrap() > 0, "{name}");
        assert!(job["read"]["total_ios"].as_u64().unwrap() > 0, "{name} verified nothing");
    }
    served.end();
}

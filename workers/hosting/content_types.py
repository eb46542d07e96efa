"""The content types of files that are served, by the endings of their names: the same on every machine.

They are those of IANA and of mime-db, on which other hosts rely. Caddy compares the endings one after the other
(`Caddyfile`), so the usual ones come first.
"""

OTHER = "application/octet-stream"
_LINES = """
text/html html htm
text/javascript js mjs cjs
text/css css
image/svg+xml svg svgz
image/png png
image/webp webp
image/jpeg jpg jpeg jpe
font/woff2 woff2
image/x-icon ico cur
application/json json map topojson
text/plain txt text log conf ini cfg diff patch bat c h ksh pl srt
text/xml xml
image/avif avif
image/gif gif
font/woff woff
font/ttf ttf
font/otf otf
application/wasm wasm
application/manifest+json webmanifest
application/pdf pdf
video/mp4 mp4 mpg4
video/webm webm
audio/mpeg mp3 mp2 mp2a m2a
text/markdown md markdown
text/csv csv
application/zip zip

application/atom+xml atom
application/dash+xml mpd
application/epub+zip epub
application/geo+json geojson
application/gpx+xml gpx
application/gzip gz tgz
application/java-archive jar war ear
application/json5 json5
application/ld+json jsonld
application/msword doc dot
application/n-quads nq
application/n-triples nt
application/oda oda
application/ogg ogx
application/pgp-signature asc sig
application/pkcs7-mime p7c p7m
application/pkcs7-signature p7s
application/pkix-cert cer
application/postscript ps ai eps
application/rdf+xml rdf owl
application/rss+xml rss
application/rtf rtf
application/sql sql
application/toml toml
application/trig trig
application/ttml+xml ttml
application/vnd.android.package-archive apk
application/vnd.apache.parquet parquet
application/vnd.apple.mpegurl m3u8 m3u
application/vnd.google-earth.kml+xml kml
application/vnd.google-earth.kmz kmz
application/vnd.ms-excel xls xlb xlt
application/vnd.ms-fontobject eot
application/vnd.ms-powerpoint ppt pot ppa pps
application/vnd.oasis.opendocument.presentation odp
application/vnd.oasis.opendocument.spreadsheet ods
application/vnd.oasis.opendocument.text odt
application/vnd.openxmlformats-officedocument.presentationml.presentation pptx
application/vnd.openxmlformats-officedocument.spreadsheetml.sheet xlsx
application/vnd.openxmlformats-officedocument.wordprocessingml.document docx
application/vnd.rar rar
application/vnd.sqlite3 sqlite sqlite3
application/wsdl+xml wsdl
application/x-7z-compressed 7z
application/x-bittorrent torrent
application/x-bzip2 bz2
application/x-cpio cpio
application/x-csh csh
application/x-dvi dvi
application/x-hdf hdf
application/x-hdf5 h5
application/x-ipynb+json ipynb
application/x-latex latex
application/x-ndjson ndjson jsonl
application/x-netcdf nc cdf
application/x-pkcs12 p12 pfx
application/x-python-code pyc pyo
application/x-sh sh
application/x-shar shar
application/x-shockwave-flash swf
application/x-tar tar
application/x-tcl tcl
application/x-tex tex
application/x-texinfo texi texinfo
application/x-troff roff t tr man me ms
application/x-x509-ca-cert pem crt der
application/x-xz xz
application/x-xpinstall xpi
application/xhtml+xml xhtml xht
application/xml xsl xsd rng
application/xml-dtd dtd
application/xslt+xml xslt
application/yaml yaml yml
application/zstd zst
audio/3gpp 3gpp
audio/3gpp2 3gpp2
audio/aac aac adts loas
audio/basic au snd
audio/flac flac
audio/midi mid midi
audio/mp4 m4a m4b
audio/ogg ogg oga opus
audio/wav wav
audio/webm weba
audio/x-aiff aif aifc aiff
audio/x-matroska mka
audio/x-pn-realaudio ra ram
font/collection ttc
image/apng apng
image/bmp bmp
image/heic heic
image/heif heif
image/jxl jxl
image/tiff tiff tif
image/vnd.adobe.photoshop psd
image/x-cmu-raster ras
image/x-portable-anymap pnm
image/x-portable-bitmap pbm
image/x-portable-graymap pgm
image/x-portable-pixmap ppm
image/x-rgb rgb
image/x-xbitmap xbm
image/x-xpixmap xpm
image/x-xwindowdump xwd
message/rfc822 eml mht mhtml nws
model/3mf 3mf
model/gltf+json gltf
model/gltf-binary glb
model/mtl mtl
model/obj obj
model/step step stp
model/stl stl
model/vnd.usdz+zip usdz
text/cache-manifest appcache
text/calendar ics ifb
text/n3 n3
text/richtext rtx
text/tab-separated-values tsv
text/turtle ttl
text/vcard vcard
text/vtt vtt
text/x-opml opml
text/x-python py
text/x-setext etx
text/x-sgml sgm sgml
text/x-vcard vcf
video/3gpp 3gp
video/3gpp2 3g2
video/mp2t ts m2ts
video/mpeg mpeg m1v mpe mpg
video/ogg ogv
video/quicktime mov qt
video/x-m4v m4v
video/x-matroska mkv
video/x-msvideo avi
video/x-sgi-movie movie
"""
_TEXTS = (
    "json",
    "json5",
    "xml",
    "xml-dtd",
    "yaml",
    "toml",
    "sql",
)  # how types end that are no `text/` and still are text


def _is_text(kind: str) -> bool:
    return kind.startswith("text/") or kind.endswith(_TEXTS)


_TYPES = {ending: kind for kind, *endings in map(str.split, filter(None, _LINES.splitlines())) for ending in endings}
TEXT_ENDINGS = {f".{ending}" for ending, kind in _TYPES.items() if _is_text(kind)} - {".svgz"}
CONTENT_TYPES = {f".{ending}": f"{kind}; charset=utf-8" if _is_text(kind) else kind for ending, kind in _TYPES.items()}

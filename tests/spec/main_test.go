package main

import (
	"bytes"
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
)

// The mutations below change the standard's own descriptor, one thing at a
// time. Each must be reported, in these words and no others.
var mutations = []struct {
	name   string
	mutate func(*descriptorpb.FileDescriptorProto)
	want   []string
}{
	{
		"renamed field",
		func(f *descriptorpb.FileDescriptorProto) {
			field(f, "Volume", "volume_id").Name = proto.String("id")
		},
		[]string{
			"message Volume field id: declaration: ours present, standard absent",
			"message Volume field volume_id: declaration: ours absent, standard present",
		},
	},
	{
		"changed number",
		func(f *descriptorpb.FileDescriptorProto) {
			field(f, "NodeStageVolumeRequest", "volume_context").Number = proto.Int32(7)
		},
		[]string{"message NodeStageVolumeRequest field volume_context: number: ours 7, standard 6"},
	},
	{
		"changed type",
		func(f *descriptorpb.FileDescriptorProto) {
			field(f, "CapacityRange", "limit_bytes").Type =
				descriptorpb.FieldDescriptorProto_TYPE_UINT64.Enum()
		},
		[]string{"message CapacityRange field limit_bytes: type: ours TYPE_UINT64, standard TYPE_INT64"},
	},
	{
		"changed message type",
		func(f *descriptorpb.FileDescriptorProto) {
			field(f, "VolumeContentSource", "volume").TypeName =
				proto.String(".csi.v1.VolumeContentSource.SnapshotSource")
		},
		[]string{"message VolumeContentSource field volume: type_name: " +
			`ours ".csi.v1.VolumeContentSource.SnapshotSource", ` +
			`standard ".csi.v1.VolumeContentSource.VolumeSource"`},
	},
	{
		"changed label",
		func(f *descriptorpb.FileDescriptorProto) {
			field(f, "CreateVolumeRequest", "volume_capabilities").Label =
				descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum()
		},
		[]string{"message CreateVolumeRequest field volume_capabilities: label: " +
			"ours LABEL_OPTIONAL, standard LABEL_REPEATED"},
	},
	{
		"changed JSON name",
		func(f *descriptorpb.FileDescriptorProto) {
			field(f, "Volume", "volume_id").JsonName = proto.String("volumeID")
		},
		[]string{`message Volume field volume_id: json_name: ours "volumeID", standard "volumeId"`},
	},
	{
		"field taken out of its oneof",
		func(f *descriptorpb.FileDescriptorProto) {
			field(f, "VolumeCapability", "mount").OneofIndex = nil
		},
		[]string{"message VolumeCapability field mount: oneof_index: ours unset, standard access_type"},
	},
	{
		"renamed oneof",
		func(f *descriptorpb.FileDescriptorProto) {
			message(f, "VolumeContentSource").OneofDecl[0].Name = proto.String("source")
		},
		[]string{
			"message VolumeContentSource field snapshot: oneof_index: ours source, standard type",
			"message VolumeContentSource field volume: oneof_index: ours source, standard type",
			"message VolumeContentSource oneof source: declaration: ours present, standard absent",
			"message VolumeContentSource oneof type: declaration: ours absent, standard present",
		},
	},
	{
		"field made optional in the sense of proto3",
		func(f *descriptorpb.FileDescriptorProto) {
			field(f, "Volume", "capacity_bytes").Proto3Optional = proto.Bool(true)
		},
		[]string{"message Volume field capacity_bytes: proto3_optional: ours true, standard unset"},
	},
	{
		"dropped csi_secret",
		func(f *descriptorpb.FileDescriptorProto) {
			proto.ClearExtension(field(f, "CreateVolumeRequest", "secrets").Options, csi.E_CsiSecret)
		},
		[]string{"message CreateVolumeRequest field secrets: option csi_secret: ours unset, standard true"},
	},
	{
		"dropped all options of a field",
		func(f *descriptorpb.FileDescriptorProto) {
			field(f, "NodeExpandVolumeRequest", "secrets").Options = nil
		},
		[]string{
			"message NodeExpandVolumeRequest field secrets: option csi_secret: ours unset, standard true",
			"message NodeExpandVolumeRequest field secrets: option alpha_field: ours unset, standard true",
		},
	},
	{
		"csi_secret set to false",
		func(f *descriptorpb.FileDescriptorProto) {
			proto.SetExtension(field(f, "DeleteVolumeRequest", "secrets").Options, csi.E_CsiSecret, false)
		},
		[]string{"message DeleteVolumeRequest field secrets: option csi_secret: ours false, standard true"},
	},
	{
		"dropped alpha_field",
		func(f *descriptorpb.FileDescriptorProto) {
			proto.ClearExtension(
				field(f, "NodeGetVolumeStatsResponse", "volume_condition").Options, csi.E_AlphaField)
		},
		[]string{"message NodeGetVolumeStatsResponse field volume_condition: " +
			"option alpha_field: ours unset, standard true"},
	},
	{
		"dropped alpha_message",
		func(f *descriptorpb.FileDescriptorProto) {
			message(f, "VolumeCondition").Options = nil
		},
		[]string{"message VolumeCondition: option alpha_message: ours unset, standard true"},
	},
	{
		"dropped alpha_enum_value",
		func(f *descriptorpb.FileDescriptorProto) {
			modes(f).Value[6].Options = nil
		},
		[]string{"message VolumeCapability.AccessMode enum Mode value SINGLE_NODE_SINGLE_WRITER: " +
			"option alpha_enum_value: ours unset, standard true"},
	},
	{
		"dropped alpha_method",
		func(f *descriptorpb.FileDescriptorProto) {
			method(f, "Controller", "GetSnapshot").Options = nil
		},
		[]string{"service Controller method GetSnapshot: option alpha_method: ours unset, standard true"},
	},
	{
		"dropped alpha_service",
		func(f *descriptorpb.FileDescriptorProto) {
			service(f, "SnapshotMetadata").Options = nil
		},
		[]string{"service SnapshotMetadata: option alpha_service: ours unset, standard true"},
	},
	{
		"added alpha_enum",
		func(f *descriptorpb.FileDescriptorProto) {
			f.EnumType[0].Options = &descriptorpb.EnumOptions{}
			proto.SetExtension(f.EnumType[0].Options, csi.E_AlphaEnum, true)
		},
		[]string{"enum BlockMetadataType: option alpha_enum: ours true, standard unset"},
	},
	{
		"option of protobuf itself",
		func(f *descriptorpb.FileDescriptorProto) {
			field(f, "Volume", "volume_id").Options =
				&descriptorpb.FieldOptions{Deprecated: proto.Bool(true)}
		},
		[]string{"message Volume field volume_id: option deprecated: ours true, standard unset"},
	},
	{
		"option of an unknown number",
		func(f *descriptorpb.FileDescriptorProto) {
			options := &descriptorpb.FieldOptions{}
			options.ProtoReflect().SetUnknown(
				protowire.AppendVarint(protowire.AppendTag(nil, 1061, protowire.VarintType), 1))
			field(f, "Volume", "volume_id").Options = options
		},
		[]string{"message Volume field volume_id: unknown content: ours a84201, standard none"},
	},
	{
		"changed number of an extension",
		func(f *descriptorpb.FileDescriptorProto) {
			extension(f, "csi_secret").Number = proto.Int32(1061)
		},
		[]string{"extension csi_secret: number: ours 1061, standard 1059"},
	},
	{
		"missing extension",
		func(f *descriptorpb.FileDescriptorProto) {
			f.Extension = without(f.Extension, "alpha_enum")
		},
		[]string{"extension alpha_enum: declaration: ours absent, standard present"},
	},
	{
		"missing method",
		func(f *descriptorpb.FileDescriptorProto) {
			s := service(f, "Node")
			s.Method = without(s.Method, "NodeExpandVolume")
		},
		[]string{"service Node method NodeExpandVolume: declaration: ours absent, standard present"},
	},
	{
		"changed output of a method",
		func(f *descriptorpb.FileDescriptorProto) {
			method(f, "Identity", "Probe").OutputType = proto.String(".csi.v1.GetPluginInfoResponse")
		},
		[]string{"service Identity method Probe: output_type: " +
			`ours ".csi.v1.GetPluginInfoResponse", standard ".csi.v1.ProbeResponse"`},
	},
	{
		"stream turned into a single reply",
		func(f *descriptorpb.FileDescriptorProto) {
			method(f, "SnapshotMetadata", "GetMetadataDelta").ServerStreaming = nil
		},
		[]string{"service SnapshotMetadata method GetMetadataDelta: " +
			"server_streaming: ours unset, standard true"},
	},
	{
		"missing service",
		func(f *descriptorpb.FileDescriptorProto) {
			f.Service = without(f.Service, "GroupController")
		},
		[]string{"service GroupController: declaration: ours absent, standard present"},
	},
	{
		"missing enum value",
		func(f *descriptorpb.FileDescriptorProto) {
			e := modes(f)
			e.Value = without(e.Value, "MULTI_NODE_READER_ONLY")
		},
		[]string{"message VolumeCapability.AccessMode enum Mode value MULTI_NODE_READER_ONLY: " +
			"declaration: ours absent, standard present"},
	},
	{
		"changed number of an enum value",
		func(f *descriptorpb.FileDescriptorProto) {
			modes(f).Value[5].Number = proto.Int32(8)
		},
		[]string{"message VolumeCapability.AccessMode enum Mode value MULTI_NODE_MULTI_WRITER: " +
			"number: ours 8, standard 5"},
	},
	{
		"missing enum",
		func(f *descriptorpb.FileDescriptorProto) {
			f.EnumType = nil
		},
		[]string{"enum BlockMetadataType: declaration: ours absent, standard present"},
	},
	{
		"extra message",
		func(f *descriptorpb.FileDescriptorProto) {
			f.MessageType = append(f.MessageType,
				&descriptorpb.DescriptorProto{Name: proto.String("Extra")})
		},
		[]string{"message Extra: declaration: ours present, standard absent"},
	},
	{
		"missing nested message",
		func(f *descriptorpb.FileDescriptorProto) {
			m := message(f, "ListVolumesResponse")
			m.NestedType = without(m.NestedType, "VolumeStatus")
		},
		[]string{"message ListVolumesResponse.VolumeStatus: declaration: ours absent, standard present"},
	},
	{
		"two messages of one name",
		func(f *descriptorpb.FileDescriptorProto) {
			f.MessageType = append(f.MessageType, message(f, "Volume"))
		},
		[]string{"file: message names: ours not unique, standard unique"},
	},
	{
		"reserved range and name",
		func(f *descriptorpb.FileDescriptorProto) {
			m := message(f, "Volume")
			m.ReservedRange = []*descriptorpb.DescriptorProto_ReservedRange{
				{Start: proto.Int32(6), End: proto.Int32(8)},
			}
			m.ReservedName = []string{"status"}
		},
		[]string{
			"message Volume: reserved_range {start 6, end 8}: ours present, standard absent",
			`message Volume: reserved_name "status": ours present, standard absent`,
		},
	},
	{
		"missing import",
		func(f *descriptorpb.FileDescriptorProto) {
			f.Dependency = slices.DeleteFunc(f.Dependency, func(name string) bool {
				return name == "google/protobuf/wrappers.proto"
			})
		},
		[]string{`file: dependency "google/protobuf/wrappers.proto": ours absent, standard present`},
	},
	{
		"changed file option",
		func(f *descriptorpb.FileDescriptorProto) {
			f.Options.GoPackage = proto.String("qsd-csi/csi")
		},
		[]string{`file: option go_package: ours "qsd-csi/csi", ` +
			`standard "github.com/container-storage-interface/spec/lib/go/csi"`},
	},
	{
		"changed syntax",
		func(f *descriptorpb.FileDescriptorProto) {
			f.Syntax = proto.String("proto2")
		},
		[]string{`file: syntax: ours "proto2", standard "proto3"`},
	},
}

func TestMutationsAreReported(t *testing.T) {
	for _, m := range mutations {
		t.Run(m.name, func(t *testing.T) {
			ours := standard()
			m.mutate(ours)
			// Through the wire, as a file from protoc would come.
			got := compare(decoded(t, ours), standard())
			if !slices.Equal(got, m.want) {
				t.Errorf("got\n\t%s\nwant\n\t%s",
					strings.Join(got, "\n\t"), strings.Join(m.want, "\n\t"))
			}
		})
	}
}

// A difference must show from either side, missing or extra.
func TestMutationsAreReportedInReverse(t *testing.T) {
	for _, m := range mutations {
		other := standard()
		m.mutate(other)
		// Which names are not unique is asked of our side only.
		if m.name != "two messages of one name" && len(compare(standard(), other)) != len(m.want) {
			t.Errorf("%s: got %q", m.name, compare(standard(), other))
		}
	}
}

func TestExempt(t *testing.T) {
	ours := standard()
	ours.Name = proto.String("elsewhere/csi.proto")
	ours.SourceCodeInfo = &descriptorpb.SourceCodeInfo{
		Location: []*descriptorpb.SourceCodeInfo_Location{
			{Span: []int32{0, 0, 1}, LeadingComments: proto.String("A comment.")},
		},
	}
	method(ours, "Identity", "Probe").Options = &descriptorpb.MethodOptions{}
	if got := compare(ours, standard()); got != nil {
		t.Errorf("got %q", got)
	}
}

func TestOrderDoesNotMatter(t *testing.T) {
	ours := standard()
	slices.Reverse(ours.Dependency)
	slices.Reverse(ours.Extension)
	slices.Reverse(ours.MessageType)
	slices.Reverse(ours.Service)
	for _, m := range ours.MessageType {
		slices.Reverse(m.Field)
		slices.Reverse(m.NestedType)
	}
	for _, s := range ours.Service {
		slices.Reverse(s.Method)
	}
	slices.Reverse(modes(ours).Value)
	// A second oneof, ahead of the first in one file and behind it in the other.
	theirs := standard()
	for _, file := range []*descriptorpb.FileDescriptorProto{ours, theirs} {
		m := message(file, "Volume")
		m.OneofDecl = []*descriptorpb.OneofDescriptorProto{
			{Name: proto.String("a")}, {Name: proto.String("b")},
		}
		field(file, "Volume", "capacity_bytes").OneofIndex = proto.Int32(0)
		field(file, "Volume", "volume_id").OneofIndex = proto.Int32(1)
	}
	slices.Reverse(message(ours, "Volume").OneofDecl)
	field(ours, "Volume", "capacity_bytes").OneofIndex = proto.Int32(1)
	field(ours, "Volume", "volume_id").OneofIndex = proto.Int32(0)
	if got := compare(ours, theirs); got != nil {
		t.Errorf("got %q", got)
	}
}

// The standard as this program sees it must be all there is in the module: the
// same as the bytes protoc gave its authors, and all of it understood.
func TestStandardIsWhole(t *testing.T) {
	compressed, _ := (*csi.Volume)(nil).Descriptor()
	r, err := gzip.NewReader(bytes.NewReader(compressed))
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	var raw descriptorpb.FileDescriptorProto
	if err := proto.Unmarshal(data, &raw); err != nil {
		t.Fatal(err)
	}
	if got := compare(&raw, standard()); got != nil {
		t.Errorf("got %q", got)
	}
	if got := len(standard().Extension); got != 7 {
		t.Errorf("got %d extensions, want 7", got)
	}
	want := totals{services: 5, methods: 32, messages: 94, fields: 196, enums: 8}
	if got := count(standard()); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestLoad(t *testing.T) {
	other := &descriptorpb.FileDescriptorProto{
		Name: proto.String("other.proto"), Package: proto.String("other.v1"),
	}
	second := standard()
	second.Name = proto.String("second.proto")
	for _, test := range []struct {
		name  string
		files []*descriptorpb.FileDescriptorProto
		fault string
	}{
		{"among others", []*descriptorpb.FileDescriptorProto{other, standard()}, ""},
		{"absent", []*descriptorpb.FileDescriptorProto{other}, "no file of package csi.v1"},
		{"twice", []*descriptorpb.FileDescriptorProto{standard(), second}, "two files of package csi.v1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			data, err := proto.Marshal(&descriptorpb.FileDescriptorSet{File: test.files})
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(t.TempDir(), "set")
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
			file, err := load(path)
			if test.fault != "" {
				if err == nil || !strings.Contains(err.Error(), test.fault) {
					t.Fatalf("got %v, want %q", err, test.fault)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := compare(file, standard()); got != nil {
				t.Errorf("got %q", got)
			}
		})
	}
}

// decoded returns a file as it is after writing and reading it.
func decoded(t *testing.T, file *descriptorpb.FileDescriptorProto) *descriptorpb.FileDescriptorProto {
	t.Helper()
	data, err := proto.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	var out descriptorpb.FileDescriptorProto
	if err := proto.Unmarshal(data, &out); err != nil {
		t.Fatal(err)
	}
	return &out
}

type named interface{ GetName() string }

// by returns the declaration of that name, which must exist.
func by[T named](list []T, name string) T {
	i := slices.IndexFunc(list, func(d T) bool { return d.GetName() == name })
	if i < 0 {
		panic("the standard has no " + name)
	}
	return list[i]
}

// without returns the list without the declaration of that name, which must
// exist.
func without[T named](list []T, name string) []T {
	by(list, name)
	return slices.DeleteFunc(slices.Clone(list), func(d T) bool { return d.GetName() == name })
}

func message(f *descriptorpb.FileDescriptorProto, name string) *descriptorpb.DescriptorProto {
	return by(f.MessageType, name)
}

func field(f *descriptorpb.FileDescriptorProto, of, name string) *descriptorpb.FieldDescriptorProto {
	return by(message(f, of).Field, name)
}

func extension(f *descriptorpb.FileDescriptorProto, name string) *descriptorpb.FieldDescriptorProto {
	return by(f.Extension, name)
}

func service(f *descriptorpb.FileDescriptorProto, name string) *descriptorpb.ServiceDescriptorProto {
	return by(f.Service, name)
}

func method(f *descriptorpb.FileDescriptorProto, of, name string) *descriptorpb.MethodDescriptorProto {
	return by(service(f, of).Method, name)
}

// modes returns the enum of access modes.
func modes(f *descriptorpb.FileDescriptorProto) *descriptorpb.EnumDescriptorProto {
	return by(message(f, "VolumeCapability").NestedType, "AccessMode").EnumType[0]
}

{{- /* Labels of a party's pods: (dict "root" . "party" "trainer"). */}}
{{- define "rlhfspec.partyLabels" -}}
{{- $names := .root.Files.Get "files/names.yaml" | fromYaml }}
{{- if has .party (.root.Files.Get "files/edges.yaml" | fromYaml).roles -}}
{{ $names.managedBy }}: {{ $names.fieldManager }}
{{ $names.role }}: {{ .party }}
{{- else -}}
{{ include "rlhfspec.selector" (list .root .party) }}
{{- end }}
{{- end }}

{{- /* A list of NetworkPolicy peers that are this party, seen from a pod of `namespace`. */}}
{{- define "rlhfspec.peers" -}}
{{- $values := .root.Values }}
{{- $graph := .root.Files.Get "files/edges.yaml" | fromYaml }}
{{- if eq .party "dns" }}
{{- toYaml $values.networkPolicy.dns }}
{{- else if eq .party "prometheus" }}
{{- toYaml $values.networkPolicy.prometheus }}
{{- else if has .party $graph.roles }}
- podSelector:
    matchLabels: {{- include "rlhfspec.partyLabels" . | nindent 6 }}
  {{- if .isJob }}
  {{- else if eq $values.operator.scope "cluster" }}
  {{- $label := splitn "=" 2 $values.operator.namespaceLabel }}
  namespaceSelector:
    matchLabels: {{ dict $label._0 $label._1 | toJson }}
  {{- else }}
  namespaceSelector:
    matchExpressions:
      - key: kubernetes.io/metadata.name
        operator: In
        values: {{ include "rlhfspec.jobNamespaces" .root }}
  {{- end }}
{{- else }}
- podSelector:
    matchLabels: {{- include "rlhfspec.partyLabels" . | nindent 6 }}
  namespaceSelector:
    matchLabels: {kubernetes.io/metadata.name: {{ .root.Release.Namespace }}}
{{- end }}
{{- end }}

{{- /* Egress rules to places that are addresses: a list of Outside. */}}
{{- define "rlhfspec.outside" -}}
{{- range . }}
- to:
    - ipBlock:
        cidr: {{ .cidr }}
        {{- with .except }}
        except: {{ toJson . }}
        {{- end }}
  ports:
    {{- range .ports }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end }}
{{- end }}

{{- /* To an external server, by its URL's port: (dict "external" .Values.nats.external "port" 4222) */}}
{{- define "rlhfspec.externalServer" -}}
{{- $port := regexFind ":[0-9]+$" .external.url | trimPrefix ":" | default (toString .port) }}
- to:
    {{- range .external.cidrs }}
    - ipBlock: {cidr: {{ . }}}
    {{- end }}
  ports: [{protocol: TCP, port: {{ $port }}}]
{{- end }}

{{- /* One edge as an egress rule. */}}
{{- define "rlhfspec.egressRule" -}}
{{- $values := .root.Values }}
{{- if eq .edge.to "api" }}
{{- include "rlhfspec.outside" $values.networkPolicy.apiServer }}
{{- else if and (eq .edge.to "nats") (not $values.nats.enabled) }}
{{- include "rlhfspec.externalServer" (dict "external" $values.nats.external "port" .edge.port) }}
{{- else if and (eq .edge.to "redis") (not $values.redis.enabled) }}
{{- include "rlhfspec.externalServer" (dict "external" $values.redis.external "port" .edge.port) }}
{{- else }}
- to: {{- include "rlhfspec.peers" (dict "root" .root "party" .edge.to "isJob" .isJob) | trim | nindent 4 }}
  ports:
    - {protocol: TCP, port: {{ .edge.port }}{{ with .edge.last }}, endPort: {{ . }}{{ end }}}
    {{- if eq .edge.to "dns" }}
    - {protocol: UDP, port: {{ .edge.port }}}
    {{- end }}
{{- end }}
{{- end }}

{{- /* The policy of one party: (dict "root" . "party" "trainer" "namespace" "team"). */}}
{{- define "rlhfspec.policy" }}
{{- $here := . }}
{{- $graph := .root.Files.Get "files/edges.yaml" | fromYaml }}
{{- $isJob := has .party $graph.roles }}
{{- $in := list }}
{{- $out := list }}
{{- range $graph.edges }}
{{- if and (eq .to $here.party) (not (and (eq .source "prometheus") (not $here.root.Values.networkPolicy.prometheus))) }}
{{- $in = append $in . }}
{{- end }}
{{- if eq .source $here.party }}
{{- $out = append $out . }}
{{- end }}
{{- end }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "rlhfspec.fullname" .root }}-{{ .party }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "rlhfspec.labels" .root | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "rlhfspec.partyLabels" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress:
    {{- range $in }}
    - from: {{- include "rlhfspec.peers" (dict "root" $here.root "party" .source "isJob" $isJob) | trim | nindent 8 }}
      ports: [{protocol: TCP, port: {{ .port }}{{ with .last }}, endPort: {{ . }}{{ end }}}] # {{ .why }}
    {{- end }}
    {{- $names := .root.Files.Get "files/names.yaml" | fromYaml }}
    {{- $visited := dict "dashboard" .root.Values.dashboard.ingressFrom "gateway" .root.Values.jobs.gateway.ingressFrom }}
    {{- with get $visited .party }}
    - from: {{- toYaml . | nindent 8 }}
      ports: [{protocol: TCP, port: {{ eq $here.party "gateway" | ternary $names.servePort $names.dashboardPort }}}]
    {{- end }}
  egress:
    {{- range $out }}
    {{- include "rlhfspec.egressRule" (dict "root" $here.root "edge" . "isJob" $isJob) | trim | nindent 4 }}
    {{- end }}
    {{- if $isJob }}
    {{- with .root.Values.networkPolicy.egress }}
    {{- range $places := list .all (index . $here.party) }}
    {{- include "rlhfspec.outside" $places | trim | nindent 4 }}
    {{- end }}
    {{- end }}
    {{- end }}
{{- end }}

{{- /* All of a job namespace: one denies, and one of each role. (dict "root" . "namespace" "team") */}}
{{- define "rlhfspec.jobPolicies" }}
{{- $here := . }}
{{- $names := .root.Files.Get "files/names.yaml" | fromYaml }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "rlhfspec.fullname" .root }}-deny-jobs
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "rlhfspec.labels" .root | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{ printf "{%s: %s}" $names.managedBy $names.fieldManager }}
  policyTypes: [Ingress, Egress]
{{- $graph := .root.Files.Get "files/edges.yaml" | fromYaml }}
{{- range $role := $graph.roles }}
{{- include "rlhfspec.policy" (dict "root" $here.root "party" $role "namespace" $here.namespace) }}
{{- end }}
{{- end }}
